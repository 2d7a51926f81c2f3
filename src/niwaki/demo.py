"""The paper's table 1 for the model that ships with niwaki."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from niwaki.calibration import load_tokenizer, read_windows
from niwaki.checkpoint import locate_model
from niwaki.effort import PLAIN_EFFORT
from niwaki.perplexity import Perplexity, evaluate
from niwaki.pipeline import prune

#: Boza 2024, table 1.
PATTERNS = ("50 %", "60 %", "70 %", "80 %", "2:4")
#: The methods of that table, and niwaki's solver, alone and as it is by default.
METHODS = ("magnitude", "wanda", "sparsegpt", "admm1", "admm-grad", "continuation", "continuation@balanced")


@dataclass(frozen=True)
class Cell:
    """One method at one pattern.

    Attributes:
        method: A name that ``make_solver`` knows, or that and an effort, as "continuation@best"; or "dense".
        pattern: Such as "50 %" or "2:4"; "" for the dense model.
        perplexity: Of the result, by the name of the text.
        seconds: That pruning took, from the model directory to the pruned one.
        error: Geometric mean of the matrices' relative errors.
        stages: Seconds by stage.
    """

    method: str
    pattern: str
    perplexity: dict[str, Perplexity]
    seconds: float = 0.0
    error: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


def table(
    model: str = "demo",
    *,
    calibration: str = "demo",
    texts: Sequence[str] = ("demo-held",),
    samples: int,
    text_samples: int,
    length: int,
    methods: Sequence[str] = METHODS,
    patterns: Sequence[str] = PATTERNS,
    done: Callable[[Cell], None] = lambda _: None,
) -> list[Cell]:
    """Prunes ``model`` by every method to every pattern and measures the perplexity of each result.

    Args:
        model: A directory or hub id.
        calibration: Text to calibrate on; see :mod:`niwaki.calibration`.
        texts: Texts to measure on.
        samples: Windows of ``calibration``.
        text_samples: Windows of each of ``texts``.
        length: Tokens in a window.
        methods: Names that ``make_solver`` knows, such as "admm-grad" or "wanda+exact"; with another effort than
            "fast" behind it, as in "continuation@best:epochs=3".
        patterns: Percentages such as "50 %", or n:m.
        done: Called with each cell as it is done.

    Returns:
        The cells, the dense model first.
    """

    def measure(directory: str | Path) -> dict[str, Perplexity]:
        return {text: evaluate(directory, text, length=length, samples=text_samples) for text in texts}

    cells = [Cell("dense", "", measure(model))]
    done(cells[0])
    tokenizer = load_tokenizer(locate_model(model))
    windows = read_windows(calibration, tokenizer, length, samples)
    for pattern in patterns:
        sparsity = float(pattern.rstrip(" %")) / 100 if pattern.endswith("%") else None
        for method in methods:
            solver, _, effort = method.partition("@")
            with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
                out = Path(scratch) / "pruned"
                record = prune(
                    model,
                    out,
                    solver=solver,
                    effort=effort or PLAIN_EFFORT,
                    sparsity=sparsity,
                    pattern=pattern if sparsity is None else None,
                    calibration=windows.tokens,
                    measure="none",
                )
                stages = dict(record.seconds)
                cell = Cell(method, pattern, measure(out), stages.pop("total"), record.mean_error, stages)
            cells.append(cell)
            done(cell)
    return cells
