"""``niwaki pack`` and ``niwaki unpack``."""

from __future__ import annotations

from typing import Annotated

import typer

from niwaki.cli.common import out, quiet_libraries
from niwaki.cli.options import Model, Output


def pack(model: Model, output: Output) -> None:
    """Write the pruned MODEL to OUT without its zeros: smaller on disk, in memory and on the way to the processor."""
    quiet_libraries()
    from niwaki.packed.pack import pack as run

    with out.status("packing") as status:
        sizes = run(model, output, lambda done, count: status.update(f"packing: tensor {done}/{count}"))
    out.print(str(sizes))
    if sizes.negative_zeros:
        out.print(
            f"{sizes.negative_zeros:,} of the values that are kept are -0.0, as W * mask leaves them: the model would "
            "be smaller with 0.0 (docs/packed.md)"
        )
    out.print(f"written to {output}", soft_wrap=True, markup=False)


def unpack(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory that 'pack' wrote.")],
    output: Output,
) -> None:
    """Write the dense model that MODEL was packed from to OUT; its weight files are the same, byte for byte."""
    quiet_libraries()
    from niwaki.packed.pack import unpack as run

    with out.status("unpacking") as status:
        run(model, output, lambda done, count: status.update(f"unpacking: tensor {done}/{count}"))
    out.print(f"written to {output}", soft_wrap=True, markup=False)
