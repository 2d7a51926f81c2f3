"""Which blocks go, and what is put into the block before them; float64 is the judge."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import niwaki
from niwaki.layer.unit_removal import Ridge
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.shrinking import search, trial
from niwaki.shrinking.search import cheapest
from niwaki.shrinking.trial import DAMPING, last_matrix
from support.float64 import Float64
from support.models import random_model, random_tokens, reference, save_model
from support.runs import files
from support.streams import stream_of

CALIBRATION = random_tokens(16, 24)


@pytest.mark.parametrize(("kinds", "count"), [*(("aaaaaa", n) for n in (1, 2, 3, 5)), ("aabaaa", 4), ("abbabc", 3)])
def test_the_runs_that_cost_least(kinds: str, count: int) -> None:
    """As among all ways to choose so many of 6 blocks, of each kind of which one stays."""
    chance = random.Random(count)
    costs = {(i, j): chance.random() * (j - i) for i in range(6) for j in range(i + 1, 7) if j - i <= count}

    def runs(gone: tuple[int, ...]) -> list[tuple[int, int]]:
        starts = [i for i in gone if i - 1 not in gone]
        return [(i, next(j for j in range(i, 8) if j not in gone)) for i in starts]

    ways = [
        gone
        for gone in itertools.combinations(range(6), count)
        if {*kinds} <= {kinds[i] for i in {*range(6)} - {*gone}}
    ]
    least = min(ways, key=lambda gone: sum(costs[run] for run in runs(gone)))
    assert cheapest(costs, kinds, count) == list(least)


def test_ridge() -> None:
    """As least squares with further rows for the ridge; inputs that are always 0 change nothing."""
    chance = torch.Generator().manual_seed(0)
    X = torch.randn(40, 7, generator=chance, dtype=torch.float64) * torch.tensor([1, 5, 0, 0.1, 2, 1, 30])
    R = torch.randn(40, 3, generator=chance, dtype=torch.float64)
    H = X.T @ X
    rows = (0.1 * H.diagonal()).sqrt().diag()
    expected = torch.linalg.lstsq(
        torch.cat([X, rows]), torch.cat([R, torch.zeros(7, 3, dtype=torch.float64)]), driver="gelsd"
    )
    D = Ridge(H.float(), 0.1).change((R.T @ X).float())
    torch.testing.assert_close(D.double(), expected.solution.T, rtol=1e-4, atol=1e-6)
    assert not D[:, 2].any()


def repaired(source: Path, tokens: Tensor, first: int, stop: int) -> Tensor:
    """The down_proj of the block before those from ``first`` to ``stop``, fitted to the dense states behind them."""
    dense = Float64(source, tokens)
    _, states, inputs = dense.run([], at=(first - 1, "mlp.down_proj"))
    assert inputs is not None
    outputs, wanted = states[first].flatten(0, 1), states[stop].flatten(0, 1)
    root = 1 / outputs.norm(dim=1, keepdim=True)
    X, R = inputs * root, (wanted - outputs) * root
    rows = (DAMPING * X.square().sum(0)).sqrt().diag()
    zeros = torch.zeros(len(rows), R.shape[1], dtype=torch.float64)
    D = torch.linalg.lstsq(torch.cat([X, rows]), torch.cat([R, zeros]), driver="gelsd").solution.T
    weight: Tensor = dense.blocks[first - 1].mlp.down_proj.weight.detach() + D
    return weight


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("depth") / "model"
    random_model("llama", num_hidden_layers=5).save_pretrained(path)
    return path


def run(model: Path, out: Path, **options: Any) -> Record:
    calibration = niwaki.Calibration(CALIBRATION)
    return niwaki.shrink(model, out, calibration=calibration, measurement=None, compute="cpu", **options)


def test_the_block_before_takes_over(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.shrinking.search.cheapest", lambda *_: [2, 3])
    record = run(source, tmp_path / "out", blocks=2, effort="fast")
    small = reference(tmp_path / "out")
    changed = small.get_parameter("model.layers.1.mlp.down_proj.weight").double()
    torch.testing.assert_close(changed, repaired(source, CALIBRATION, 2, 4), rtol=1e-3, atol=1e-5)
    (repair,) = record.matrices
    assert (repair.block, repair.name) == (1, "mlp.down_proj")
    assert repair.error < float(repair.stats["gap_before"])


def test_what_runs_cost(source: Path) -> None:
    """The predictions of the model without a run, with the block before it repaired, against the dense ones."""
    costs = search.costs_of_runs(stream_of(source), CALIBRATION, 2, World(), Progress())
    assert sorted(costs) == sorted((i, j) for i in range(5) for j in (i + 1, i + 2) if j <= 5)
    fitted, compared = search.parts(CALIBRATION, 1)
    for first, stop in ((0, 1), (2, 3), (1, 3), (3, 5)):
        other = Float64(source, compared)
        dense = other.run([])[0]
        if first:
            other.blocks[first - 1].mlp.down_proj.weight.data.copy_(repaired(source, fitted, first, stop))
        p, q = (x[:, :: trial.EVERY].log_softmax(-1) for x in (dense, other.run(list(range(first, stop)))[0]))
        assert costs[first, stop] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=2e-3)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("llama", "mlp.down_proj"),
        ("gpt2", "mlp.c_proj"),
        ("opt", "fc2"),
        ("gpt_neox", "mlp.dense_4h_to_h"),
        ("gemma2", None),  # a norm follows
        ("mixtral", None),
        ("deepseek_v3", "mlp.down_proj"),  # of its first block, which has no experts
    ],
)
def test_the_last_matrix_of_a_block(tmp_path: Path, case: str, name: str | None) -> None:
    model: StreamedModel = stream_of(save_model(tmp_path / "model", case))
    states = model.embed(CALIBRATION[:2])
    stream = model.stream()
    block = next(stream)
    before = {key: value.clone() for key, value in block.module.state_dict().items()}
    found = last_matrix(block, states)
    assert (found.name if found else None) == name
    assert all(torch.equal(value, before[key]) for key, value in block.module.state_dict().items())


def test_the_same_bytes(source: Path, tmp_path: Path) -> None:
    """Of blocks, neurons and fits together, with text of the model's own."""
    options: dict[str, Any] = {"blocks": 2, "neurons": 0.25, "effort": "balanced:synthetic=0.5:batch=48"}
    record = run(source, tmp_path / "out", **options)
    run(source, tmp_path / "again", **options)
    assert files(tmp_path / "out") == files(tmp_path / "again")
    assert record.calibration["synthetic"] == 8
