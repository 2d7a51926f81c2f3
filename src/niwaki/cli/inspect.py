"""``niwaki inspect``."""

from niwaki.cli.common import in_session, out
from niwaki.cli.options import Model, options
from niwaki.cli.screen import Screen
from niwaki.cli.tables import inspection_tables


@options()
def inspect(model: Model) -> None:
    """Show which matrices of MODEL would be pruned and how sparse they are now.

    Example: niwaki inspect MODEL
    """
    with Screen(f"reading {model}"), in_session():
        from niwaki.evaluation.inspect import opened, summaries
        from niwaki.models.extra import find_extra

        found = opened(model)
        matrices, extra, pruning = list(summaries(found)), find_extra(found), found.checkpoint.pruning
    for table in inspection_tables(matrices, found.left_dense, extra):
        out.print(table)
        out.print()
    if pruning.has_factors:
        out.print(f"{pruning.pattern}: these matrices are products of two sparse factors, which the tables do not show")
