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
        help="Packed integers of a grid of 4 or 8 bits, what 'pack' writes, or one file for llama.cpp.",
    ),
]


@options()
def pack(model: Model, output: Output) -> None:
    """Write the pruned MODEL to OUT without its zeros: smaller on disk, in memory and on the way to the processor."""
    with Screen(f"packing {model}") as screen, screen.all_or_nothing(output), in_session():
        from niwaki.packed.pack import pack as run

        sizes = run(model, output, screen)
    for line in sizes.described:
        out.print(line)
    written(output)


@options()
def unpack(model: Model, output: Output) -> None:
    """Write the dense model that MODEL was packed from to OUT; its weight files are the same, byte for byte.

    Products of two factors are computed again, which may change their last digits.

    Options:
        model: A directory that 'pack' wrote.
    """
    with Screen(f"unpacking {model}") as screen, screen.all_or_nothing(output), in_session():
        from niwaki.packed.unpack import unpack as run

        run(model, output, screen)
    written(output)


@options()
def export(model: Model, output: Output, form: Format = "compressed-tensors") -> None:
    """Write MODEL in another format: for llama.cpp and Ollama, for vLLM and transformers, or without its zeros.

    Options:
        output: A directory that does not exist or is empty; or a file for llama.cpp that ends in .gguf.
    """
    with Screen(f"exporting {model}") as screen, screen.all_or_nothing(output), in_session():
        from niwaki.exports.export import export as run

        for note in run(model, output, form, screen):
            screen.note(note)
    written(output)
