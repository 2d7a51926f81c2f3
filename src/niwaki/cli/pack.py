"""``niwaki pack``, ``niwaki unpack`` and ``niwaki export``."""

from typing import Annotated

from typer import Argument

from niwaki.cli.common import in_session, out, written
from niwaki.cli.options import Model, Output
from niwaki.cli.screen import Screen

Packed = Annotated[str, Argument(metavar="MODEL", help="A directory that 'pack' wrote.")]
Quantized = Annotated[str, Argument(metavar="MODEL", help="A directory that 'prune --quantize' wrote.")]


def pack(model: Model, output: Output) -> None:
    """Write the pruned MODEL to OUT without its zeros: smaller on disk, in memory and on the way to the processor."""
    with Screen(f"packing {model}") as screen, in_session():
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
    with Screen(f"unpacking {model}") as screen, in_session():
        from niwaki.packed.pack import unpack as run

        run(model, output, screen)
    written(output)


def export(model: Quantized, output: Output) -> None:
    """Write MODEL, whose weights are on a grid of 4 or 8 bits, to OUT as packed integers (compressed-tensors)."""
    with Screen(f"exporting {model}"), in_session():
        from niwaki.packed.compressed_tensors import export as run

        run(model, output)
    written(output)
