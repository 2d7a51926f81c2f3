"""The paper's table 1 for the model that ships with niwaki."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from niwaki.calibration import load_tokenizer, read_windows
from niwaki.checkpoint import locate_model
from niwaki.evaluate import Perplexity, evaluate
from niwaki.prune import prune
from niwaki.solvers import SOLVERS

#: Boza 2024, table 1.
PATTERNS = ("50 %", "60 %", "70 %", "80 %", "2:4")


@dataclass(frozen=True)
class Cell:
    """One method at one pattern.

    Attributes:
        method: A name of ``SOLVERS``, or "dense".
        pattern: A member of ``PATTERNS``, or "".
        perplexity: Of the result.
        seconds: For the whole run, without the perplexity.
        error: Geometric mean of the matrices' relative errors.
    """

    method: str
    pattern: str
    perplexity: Perplexity
    seconds: float = 0.0
    error: float = 0.0


def table(
    model: str = "demo",
    *,
    calibration: str = "demo",
    text: str = "demo-held",
    samples: int,
    text_samples: int,
    length: int,
    methods: Sequence[str] = tuple(SOLVERS),
    patterns: Sequence[str] = PATTERNS,
    device: str = "auto",
    done: Callable[[Cell], None] = lambda _: None,
) -> list[Cell]:
    """Prunes ``model`` by every method to every pattern and measures the perplexity of each result.

    Args:
        model: A directory or hub id.
        calibration: Text to calibrate on; see :mod:`niwaki.calibration`.
        text: Text to measure on.
        samples: Windows of ``calibration``.
        text_samples: Windows of ``text``.
        length: Tokens in a window.
        methods: Names of ``SOLVERS``.
        patterns: Percentages such as "50 %", or n:m.
        device: As in :func:`niwaki.prune`.
        done: Called with each cell as it is done.

    Returns:
        The cells, the dense model first.
    """
    tokenizer = load_tokenizer(locate_model(model))
    windows = read_windows(calibration, tokenizer, length, samples)
    held = read_windows(text, tokenizer, length, text_samples)
    cells = []

    def add(cell: Cell) -> None:
        cells.append(cell)
        done(cell)

    add(Cell("dense", "", evaluate(model, text, length=length, samples=text_samples, device=device)))
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        for pattern in patterns:
            sparse = float(pattern.rstrip(" %")) / 100 if pattern.endswith("%") else None
            for method in methods:
                began = time.perf_counter()
                record = prune(
                    model,
                    Path(scratch) / f"{method} {len(cells)}",
                    solver=method,
                    sparsity=sparse,
                    pattern=pattern if sparse is None else None,
                    calibration=windows.tokens,
                    text=held.tokens,
                    measure="after",
                    device=device,
                )
                measured = Perplexity(**record.perplexity["after"])
                seconds = time.perf_counter() - began
                add(Cell(method, pattern, measured, seconds, record.mean_error))
    return cells
