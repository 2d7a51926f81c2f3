"""``niwaki export``."""

from __future__ import annotations

from typing import Annotated

import typer

from niwaki.cli.common import out, quiet_libraries
from niwaki.cli.options import Output


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory that 'prune --quantize' wrote.")],
    output: Output,
) -> None:
    """Write MODEL, whose weights are on a grid of 4 or 8 bits, to OUT as packed integers (compressed-tensors)."""
    quiet_libraries()
    from niwaki.packed.compressed_tensors import export as run

    with out.status("exporting"):
        run(model, output)
    out.print(f"written to {output}", soft_wrap=True, markup=False)
