"""``niwaki pack``, ``niwaki unpack`` and ``niwaki export``."""

from typing import Annotated

from typer import Option

from niwaki.choices import ExportFormat
from niwaki.cli.common import in_session, out, written
from niwaki.cli.options import Model, Output, options
from niwaki.cli.screen import Screen

#: Whatever the case of its letters, which only typer's own option can say.
Format = Annotated[
    ExportFormat,
    Option(
        "--format",
        case_sensitive=False,
        help="Packed integers of 4 or 8 bits (compressed-tensors), the format of 'pack', or GGUF.",
    ),
]


@options()
def pack(model: Model, output: Output) -> None:
    """Store MODEL compactly in OUT: zeros left out, weights at their actual bit width.

    For a pruned or quantized model. 'niwaki generate' runs the result, and 'niwaki unpack' undoes it.

    Example: niwaki pack MODEL OUT
    """
    with Screen(f"packing {model}", output=output) as screen, in_session():
        from niwaki.packed.pack import pack as run

        sizes = run(model, output, screen)
    for line in sizes.described:
        out.print(line)
    written(output)


@options()
def unpack(model: Model, output: Output) -> None:
    """Write the dense model that MODEL was packed from to OUT, with the same weight files, byte for byte.

    Products of two factors are computed again, which may change their last digits.

    Example: niwaki unpack PACKED OUT

    Options:
        model: A directory that 'pack' wrote.
    """
    with Screen(f"unpacking {model}", output=output) as screen, in_session():
        from niwaki.packed.unpack import unpack as run

        run(model, output, screen)
    written(output)


@options()
def export(model: Model, output: Output, form: Format = "compressed-tensors") -> None:
    """Write MODEL in another format: GGUF for llama.cpp and Ollama, packed integers for vLLM and transformers.

    Example: niwaki export MODEL model.gguf --format gguf-q8_0

    Options:
        output: Output directory, new or empty; or a file for llama.cpp that ends in .gguf.
    """
    with Screen(f"exporting {model}", output=output) as screen, in_session():
        from niwaki.exports.export import export as run

        for note in run(model, output, form, screen):
            screen.note(note)
    written(output)
