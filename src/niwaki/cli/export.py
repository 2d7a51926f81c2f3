"""``niwaki export``."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from niwaki.cli.common import in_session, written
from niwaki.cli.options import Output
from niwaki.cli.screen import Screen

Model = Annotated[str, Argument(metavar="MODEL", help="A directory that 'prune --quantize' wrote.")]


def export(model: Model, output: Output) -> None:
    """Write MODEL, whose weights are on a grid of 4 or 8 bits, to OUT as packed integers (compressed-tensors)."""
    with Screen(f"exporting {model}"), in_session():
        from niwaki.packed.compressed_tensors import export as run

        run(model, output)
    written(output)
