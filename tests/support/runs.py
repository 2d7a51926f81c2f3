"""Whole runs: what they wrote, and how to stop them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from niwaki import prune
from niwaki.checkpoints.reading import Checkpoint
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers import Solver
from niwaki.models import formats, scales
from niwaki.models.outside import embedding_keys
from niwaki.models.scales import grid_of, whole_numbers_of
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord, Record
from support.arguments import arguments
from support.models import random_tokens


@dataclass(frozen=True)
class Untouched(Solver):
    """Gives back what it was given."""

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        return problem.solution(problem.W, torch.ones_like(problem.W, dtype=torch.bool))

    def flops(self, rows: int, columns: int) -> float:
        return 0.0


def tensors(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def zeros(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.count_nonzero())


class StopAt(Progress):
    """Interrupts the run when it has solved so many matrices."""

    def __init__(self, matrices: int) -> None:
        self.left = matrices
        self.notes: list[str] = []

    def solved(self, matrix: MatrixRecord) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


def files(directory: Path, *without: str) -> dict[str, bytes]:
    """The contents of all files but the record, which has the time, and those ``without``."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("niwaki.json", *without)
    }


def listing(directory: Path) -> list[str]:
    found = [Path(place, name) for place, *names in os.walk(directory) for name in (*names[0], *names[1])]
    return sorted(str(path.relative_to(directory)) for path in found)


#: What differs from run to run, by its key.
_TIMES = ("seconds", "stages", "measuring", "peak_memory", "resumed")


def contents_of(place: Path, compares: bool = False) -> dict[str, str]:
    """All below ``place``: digests of files, without what times are in; of a command that ``compares`` no models."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if compares and name.startswith("out/models"):
            continue  # a model stays where a comparison is killed after its cell is done and before it is removed
        if path.is_dir():
            found[name] = "a folder"
        elif path.suffix in (".csv", ".md", ".tex") and compares:
            found[name] = "a table"
        elif ".partial" in name:  # half of a file, perhaps
            found[name] = "unfinished"
        elif path.suffix == ".json" and (
            path.stem in ("niwaki", "compare", "eval") or path.parent.name in ("records", "runs")
        ):
            found[name] = json.dumps(_without_times(json.loads(path.read_text())), sort_keys=True)
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(each) for key, each in value.items() if key not in _TIMES}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


class Diary(Progress):
    """Writes down what it is told, and raises where it is asked to."""

    def __init__(self, fail_at: str = "", wants_steps: bool = False) -> None:
        self.fail_at = fail_at
        self.wants_steps = wants_steps
        self.events: list[tuple[Any, ...]] = []

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        if event[0] == self.fail_at:
            raise KeyboardInterrupt

    def stages(self) -> list[tuple[Any, ...]]:
        """(block, name, steps that were announced, steps that were made) of each stage."""
        found: list[tuple[Any, ...]] = []
        for event in self.events:
            if event[0] == "stage":
                found.append((*event[1:], 0))
            elif event[0] == "step":
                found[-1] = (*found[-1][:3], found[-1][3] + 1)
        return found

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        self._note("begin", blocks, matrices)

    def stage(self, block: int, name: str, steps: int) -> None:
        self._note("stage", block, name, steps)

    def step(self) -> None:
        self._note("step")

    def solving(self, matrix: str, step: int, steps: int, error: float) -> None:
        self._note("solving", matrix, step, steps, error)

    def solved(self, matrix: MatrixRecord) -> None:
        self._note("solved", matrix.block, matrix.name)

    def note(self, text: str) -> None:
        self._note("note", text)

    def end(self, record: Record) -> None:
        self._note("end")


def run_magnitude(model: Path, out: Path, **changes: Any) -> Record:
    """``prune`` by magnitude, with small inputs and without a tokenizer."""
    options: dict[str, Any] = {"solver": "magnitude", "calibration": random_tokens(8, 24)}
    options |= {"device": "cpu", "dtype": "float32"}
    if "pattern" not in changes and "sparsity" not in changes and "mask_from" not in changes:
        options["sparsity"] = 0.5
    return prune(model, out, **arguments(**{**options, **changes}))


#: Options of a run of a moment.
SMALL = ("--calibration", "demo", "--samples", "4", "--length", "32", "--text-samples", "2", "--device", "cpu")


def run(model: Path, out: Path, **changes: Any) -> Record:
    options: dict[str, Any] = {"solver": "wanda", "sparsity": 0.5, "device": "cpu"}
    options |= {"calibration": random_tokens(4, 24), "text": random_tokens(2, 24, seed=1)}
    return prune(model, out, **arguments(**{**options, **changes}))


def stopped(model: Path, out: Path, matrices: int = 10, **changes: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model, out, progress=StopAt(matrices), **changes)


def check_claims(directory: Path) -> dict[str, Any]:
    """What config.json says of the weights, all of which is true of the files, and nothing else lies beside them."""
    checkpoint = Checkpoint(directory)
    model, claims, names = StreamedModel(checkpoint, "cpu"), checkpoint.pruning, set[str]()
    matrices = [matrix for matrix in model.matrices() if claims.includes(matrix.block)]
    grid, total = grid_of(checkpoint), 0
    for matrix in matrices:
        W = matrix.read(checkpoint)
        if claims.has_factors:
            names.add(formats.FACTORS_FILE)
            parts = formats.Factored(whole_numbers_of(checkpoint)).read_parts(checkpoint, matrix)
            assert formats.is_product(W, parts)
            assert not grid or all(map(grid.has, parts[:2], parts[2:]))
            total += W.numel() - sum(int(part.count_nonzero()) for part in parts[:2])
        else:
            total += zeros(W)
            if grid:
                names.add(scales.FILE)
                assert grid.has(W, scales.read_scales(checkpoint, matrix, grid))
    assert claims.sparsity == pytest.approx(total / sum(matrix.size for matrix in matrices), abs=1e-3)
    if ends := scales.embedding_grid_of(checkpoint):
        names.add(scales.EMBEDDINGS)
        for key in embedding_keys(model):
            assert ends.has(checkpoint.read(key), scales.read_embedding_scales(checkpoint, key, ends))
    beside = {scales.FILE, scales.EMBEDDINGS, formats.FACTORS_FILE}
    assert {name for name in beside if (directory / name).exists()} == names
    told: dict[str, Any] = checkpoint.config["pruning_config"]
    return told
