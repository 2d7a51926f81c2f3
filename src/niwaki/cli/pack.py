"""``niwaki pack``, ``niwaki unpack`` and ``niwaki export``."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from niwaki.cli.common import in_session, out, written
from niwaki.cli.options import Model, Output
from niwaki.cli.screen import Screen
from niwaki.errors import UsageError

Packed = Annotated[str, Argument(metavar="MODEL", help="A directory that 'pack' wrote.")]
Gguf = Annotated[
    Literal["F16", "Q8_0", "Q4_0"] | None,
    Option(help="Write one file for llama.cpp, of any MODEL, with its matrices in this format."),
]
Exported = Annotated[
    str, Argument(metavar="OUT", help="A directory that does not exist or is empty; with --gguf a file that does not.")
]


def pack(model: Model, output: Output) -> None:
    """Write the pruned MODEL to OUT without its zeros: smaller on disk, in memory and on the way to the processor."""
    with Screen(f"packing {model}") as screen, screen.all_or_nothing(output), in_session():
        from niwaki.packed.pack import pack as run

        sizes = run(model, output, screen)
    out.print(str(sizes))
    if sizes.negative_zeros:
        out.print(
            f"{sizes.negative_zeros:,} of the values that are kept are -0.0, as W * mask leaves them: the model would "
            "be smaller with 0.0 (docs/packed.md)"
        )
    written(output)


def unpack(model: Packed, output: Output) -> None:
    """Write the dense model that MODEL was packed from to OUT; its weight files are the same, byte for byte."""
    with Screen(f"unpacking {model}") as screen, screen.all_or_nothing(output), in_session():
        from niwaki.packed.pack import unpack as run

        run(model, output, screen)
    written(output)


def export(model: Model, output: Exported, gguf: Gguf = None) -> None:
    """Write MODEL for other programs: packed integers of a grid of 4 or 8 bits (compressed-tensors), or --gguf."""
    with Screen(f"exporting {model}") as screen, screen.all_or_nothing(output), in_session():
        if gguf is None and Path(output).suffix.lower() == ".gguf":
            raise UsageError(f"{output} would be a file for llama.cpp; add --gguf F16, Q8_0 or Q4_0")
        if gguf:
            from niwaki.exports.gguf_file import export_gguf

            for note in export_gguf(model, output, gguf):
                screen.note(note)
        else:
            from niwaki.exports.compressed_tensors import export as run

            run(model, output)
    written(output)
