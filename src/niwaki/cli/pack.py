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
        help="compressed-tensors: integers of 4 or 8 bits; packed: as 'niwaki pack' writes; gguf-...: for llama.cpp.",
    ),
]


@options()
def pack(model: Model, output: Output) -> None:
    """Store MODEL compactly in OUT, without its zeros and with weights in only as many bits as they have.

    MODEL is pruned or quantized. 'niwaki generate' runs the result, and 'niwaki unpack' restores MODEL.

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
    """Turn a packed MODEL back into the dense one it was made from, byte for byte, and write that to OUT.

    Only products of two factors are computed again, which may change their last digits.

    Example: niwaki unpack PACKED OUT

    Options:
        model: A directory that 'niwaki pack' wrote.
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
        output: Output directory, new or empty; or for llama.cpp a file that ends in .gguf.
    """
    with Screen(f"exporting {model}", output=output) as screen, in_session():
        from niwaki.exports.export import export as run

        for note in run(model, output, form, screen):
            screen.note(note)
    written(output)
