"""What most cases start from: a tiny model with a tokenizer, what niwaki makes of it, and texts."""

from __future__ import annotations

import stat
from pathlib import Path

from support.forks import command
from support.models import save_model_with_tokenizer

#: Little text, so that a run takes a fraction of a second; and as small a healing, of which a step has one window.
_FEW = ("--calibration", "demo", "--length", "32", "--text-samples", "2")
SMALL, HEALING = (*_FEW, "--samples", "4"), (*_FEW, "--tokens", "300", "--batch", "32")


def furnish(place: Path) -> None:
    """Puts ``model``, ``pruned``, ``packed`` and ``text.txt`` into a directory."""
    save_model_with_tokenizer(place / "model")
    (place / "text.txt").write_text("The trees of the garden are pruned in autumn. " * 200)
    for arguments in (
        ("prune", "model", "pruned", "--sparsity", "0.5", "--solver", "wanda", *SMALL),
        ("pack", "pruned", "packed"),
    ):
        ended = command(arguments, place)
        assert ended.code == 0, ended.err


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file below, to see whether any was touched; -1 for a folder's."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        folder = stat.S_ISDIR(status.st_mode)  # a link may lead nowhere
        found[str(path.relative_to(directory))] = (-1, 0) if folder else (status.st_size, status.st_mtime_ns)
    return found
