"""``niwaki inspect``."""

from niwaki.cli.common import in_session, out
from niwaki.cli.options import Model, options
from niwaki.cli.screen import Screen
from niwaki.cli.tables import inspection_tables


@options()
def inspect(model: Model) -> None:
    """Show which matrices of MODEL would be pruned, and how sparse MODEL is.

    Example: niwaki inspect MODEL
    """
    with Screen(f"reading {model}"), in_session():
        from niwaki.evaluation.inspect import extra_tensors, inspect as run, left_dense, pattern_of_factors

        matrices, left, extra = list(run(model)), left_dense(model), extra_tensors(model)
        factors = pattern_of_factors(model)
    for table in inspection_tables(matrices, left, extra):
        out.print(table)
        out.print()
    if factors:
        out.print(f"{factors}: these matrices are products of two sparse factors, which the tables do not show")
