"""``niwaki solvers``."""

import dataclasses
import sys

from rich.table import Table

from niwaki.cli.common import out
from niwaki.cli.options import options

#: What solvers of one module do that differ in their parameters; all others are described by their module.
_BY_PARAMETERS = {
    "admm-grad": "ADMM with the mask chosen on the way, while the weights adapt; arXiv 2401.02938.",
    "admm1": "ADMM on the weights of a mask that is chosen first; arXiv 2401.02938.",
    "adam": "Fits the weights to a mask by gradient descent with Adam; arXiv 2102.08124.",
    "sgd": "Fits the weights to a mask by gradient descent with momentum; arXiv 2102.08124.",
}


@options()
def solvers() -> None:
    """List the pruning methods for --solver, with their parameters.

    Example: niwaki solvers
    """
    from niwaki.layer.solvers import SOLVERS

    table = Table("name", "what it does", "parameters and defaults", box=None, padding=(0, 2, 0, 0))
    for name, solver in SOLVERS.items():
        module = sys.modules[type(solver).__module__]
        what = _BY_PARAMETERS.get(name) or (module.__doc__ or "").partition(":")[2].strip()
        values = ", ".join(f"{key}={value}" for key, value in dataclasses.asdict(solver).items())
        table.add_row(name, what[:1].upper() + what[1:], values)
    out.print(table)
