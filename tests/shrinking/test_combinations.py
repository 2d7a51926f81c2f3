"""Models of a given size: what may go together, what it costs, and which of it is chosen; float64 is the judge."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

import niwaki
from niwaki.errors import UsageError
from niwaki.layer.problem import Gram
from niwaki.layer.unit_removal import DAMPING as RIDGE
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.shrinking import search, trial
from niwaki.shrinking.configuration import Tensors, tensors_of_blocks
from niwaki.shrinking.search import Combination, Combinations, best_of, costs_of_combinations
from niwaki.shrinking.trial import DAMPING
from niwaki.shrinking.units import ColumnUnits, heads_of, neurons_of
from support.float64 import Float64
from support.models import message, random_model, random_tokens, reference, save_random
from support.runs import files
from support.streams import stream_of

CALIBRATION = random_tokens(16, 24)
DEPTH = 5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("combinations") / "model"
    random_model("llama grouped", num_hidden_layers=DEPTH).save_pretrained(path)
    return path


def run(model: Path, out: Path, **options: Any) -> Record:
    calibration = niwaki.Calibration(CALIBRATION)
    return niwaki.shrink(model, out, calibration=calibration, measurement=None, compute="cpu", **options)


def combinations(model: StreamedModel, target: int, kinds: list[ColumnUnits] | None = None) -> Combinations:
    kinds = [heads_of(model), neurons_of(model)] if kinds is None else kinds
    return Combinations(model, Tensors([], *tensors_of_blocks(model)), kinds, target)


def numbers(path: Path) -> int:
    return sum(each.numel() for each in reference(path).state_dict().values())


def lost(
    source: Path, fitted: Tensor, tokens: Tensor, made: Combination, kept: Mapping[tuple[str, int], Tensor]
) -> float:
    """The KL divergence of the model without ``made`` on ``tokens``, with all regressions on ``fitted``, by lstsq.

    ``kept`` are the columns that stay of o_proj and down_proj of each block.
    """
    dense, other = Float64(source, fitted), Float64(source, tokens)
    before = other.run([])[0]
    for at in range(DEPTH):
        if at in made.blocks:
            continue
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            if (columns := kept.get((name, at))) is None:
                continue
            X = dense.run([], at=(at, name))[2]
            assert X is not None
            W = dense.blocks[at].get_submodule(name).weight.detach()
            rows = torch.cat([X / len(X) ** 0.5, (RIDGE * X.square().mean(0)).sqrt().diag()])
            V = torch.zeros_like(W)
            V[:, columns] = torch.linalg.lstsq(rows[:, columns], rows @ W.T).solution.T
            other.blocks[at].get_submodule(name).weight.data.copy_(V)
        if at + 1 in made.blocks:
            stop = next(i for i in range(at + 1, DEPTH + 1) if i not in made.blocks)
            _, states, X = dense.run([], at=(at, "mlp.down_proj"))
            assert X is not None
            down = other.blocks[at].mlp.down_proj.weight
            outputs, wanted = states[at + 1].flatten(0, 1), states[stop].flatten(0, 1)
            root = 1 / outputs.norm(dim=1, keepdim=True)
            own = outputs + X @ (down.detach() - dense.blocks[at].mlp.down_proj.weight.detach()).T
            columns = down.detach().any(dim=0)
            Z = X[:, columns] * root
            ridge = torch.cat([Z, (DAMPING * Z.square().sum(0)).sqrt().diag()])
            R = torch.cat([(wanted - own) * root, torch.zeros(Z.shape[1], own.shape[1], dtype=torch.float64)])
            down.data[:, columns] += torch.linalg.lstsq(ridge, R, driver="gelsd").solution.T
    p, q = (x[:, :: trial.EVERY].log_softmax(-1) for x in (before, other.run([*made.blocks])[0]))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("own", [None, random_tokens(12, 24, seed=5)])
def test_what_they_cost(source: Path, own: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictions of the whole smaller model, its regressions on the dense model's inputs; to text of its own."""
    model = stream_of(source)
    kinds = [heads_of(model), neurons_of(model)]
    chosen: dict[tuple[str, int, str, int], Tensor] = {}
    solve = trial.RemovalTrial._solved

    def solved(
        self: Any, units: ColumnUnits, matrix: Matrix, W: Tensor, gram: Gram, counts: list[int]
    ) -> Iterator[tuple[int, Tensor]]:
        for count, weights in solve(self, units, matrix, W, gram, counts):
            if count:
                chosen[matrix.name, matrix.block, units.kind, count] = weights.any(dim=0)
            yield count, weights

    monkeypatch.setattr(trial.RemovalTrial, "_solved", solved)
    ways = [Combination(blocks, {}) for blocks in ((), (2,))]
    ways += [Combination(blocks, {"neurons": 16}) for blocks in ((), (0, 4))]
    ways += [Combination((1, 2), {"heads": 1, "neurons": 8}), Combination((3,), {"heads": 1})]
    costs = costs_of_combinations(model, CALIBRATION, own, ways, kinds, {}, World(), Progress())
    fitted, compared = search.parts(CALIBRATION, 1) if own is None else (own, CALIBRATION)
    for way, cost in zip(ways, costs, strict=True):
        kept = {(name, at): mask for (name, at, kind, count), mask in chosen.items() if count == way.units.get(kind)}
        assert cost == pytest.approx(lost(source, fitted, compared, way, kept), rel=2e-3, abs=1e-6), way


@pytest.mark.parametrize("case", ["llama", "gemma4_text"])
def test_blocks_alone_cost_what_their_run_does(tmp_path: Path, case: str) -> None:
    """Also where later blocks attend to keys and values of one that is gone, which then are the dense model's."""
    random_model(case).save_pretrained(tmp_path / "model")
    model = stream_of(tmp_path / "model")
    runs = search.costs_of_runs(model, CALIBRATION, 1, World(), Progress())
    ways = [Combination((block,), {}) for block in range(len(model.blocks))]
    costs = costs_of_combinations(model, CALIBRATION, None, ways, [neurons_of(model)], {}, World(), Progress())
    assert costs == [runs[block, block + 1] for block in range(len(model.blocks))]


@pytest.mark.parametrize("share", [0.55, 0.75, 0.9])
def test_each_leaves_what_is_wanted_and_no_less(source: Path, share: float) -> None:
    model = stream_of(source)
    whole = numbers(source)
    found = combinations(model, int(share * whole))
    costs = {(i, j): 1.0 * (j - i) for i in range(DEPTH) for j in range(i + 1, DEPTH + 1) if j - i <= 4}
    ways = found.of(costs)
    assert len({str(way) for way in ways}) == len(ways) > 2
    for way in ways:
        size = found.tensors.parameters(model, found.removals(way.units), way.blocks)
        assert size <= int(share * whole)
        if count := way.units.get("neurons", 0):
            fewer = {**way.units, "neurons": count - 1}
            removals = found.removals({kind: number for kind, number in fewer.items() if number})
            assert found.tensors.parameters(model, removals, way.blocks) > int(share * whole)


def test_blocks_of_several_sizes(tmp_path: Path) -> None:
    """Also where those that cost least are the small ones, some way is left for each number that is not refused."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "shared_intermediate_size": 16, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_local_experts": 0}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    kinds = {"layer_types": ["mamba", "mamba", "attention", "attention"]}
    source = save_random(
        tmp_path / "model", AutoConfig.for_model("granitemoehybrid", **sizes, **heads, **mamba, **kinds)
    )
    model = stream_of(source)
    costs = {(i, j): (1.0 if i < 2 else 0.1) * (j - i) for i in range(4) for j in range(i + 1, 5)}
    tried = 0
    for share in torch.linspace(0.5, 0.99, 50).tolist():
        found = combinations(model, int(share * numbers(source)), [])
        with contextlib.suppress(UsageError):
            found.check()
            assert found.of(costs), share
            tried += 1
    assert tried > 10


def test_the_one_that_costs_least_goes(source: Path, tmp_path: Path) -> None:
    """The result has the size, says what else there was, and is what the numbers themselves give."""
    record = run(source, tmp_path / "out", parameters=0.8)
    structure = record.structure
    assert structure
    assert structure.parameters["after"] == numbers(tmp_path / "out") <= 0.8 * numbers(source)
    units = {"blocks": len(structure.blocks)}
    units |= {kind: len(getattr(structure, kind)[0]) for kind in ("heads", "neurons") if getattr(structure, kind)}
    chosen = ", ".join(
        f"{count} {kind.removesuffix('s') if count == 1 else kind}" for kind, count in units.items() if count
    )
    least = min(structure.combinations.values())
    assert structure.combinations[chosen] == least or len(chosen.split(", ")) == 1
    assert any(note.startswith(f"without {chosen} ") for note in record.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pruning_config"]["pattern"] == record.pattern
    reference(tmp_path / "out")
    numbers_of = {"heads": 2, "neurons": 48}
    shares = {kind: count / numbers_of[kind] for kind, count in units.items() if kind in numbers_of and count}
    run(source, tmp_path / "same", blocks=units["blocks"], **shares)
    out, same = files(tmp_path / "out"), files(tmp_path / "same")
    weights = [name for name in out if name.endswith(".safetensors")]
    assert weights
    assert all(out[name] == same[name] for name in weights)


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [((1.0, 0.99, 1.2), "1 block"), ((1.0, 0.94, 1.2), "1 block, 5 heads"), ((1.0, 1.1, 0.9), "9 neurons")],
)
def test_several_kinds_have_to_gain(costs: tuple[float, ...], chosen: str) -> None:
    ways = [Combination((3,), {}), Combination((3,), {"heads": 5}), Combination((), {"neurons": 9})]
    assert str(best_of(ways, costs)) == chosen


def test_blocks_alone_where_nothing_else_can_go(tmp_path: Path) -> None:
    """Of a mixture of experts; its neurons and heads stay, which the record says."""
    source = tmp_path / "model"
    random_model("mixtral", num_hidden_layers=4).save_pretrained(source)
    record = run(source, tmp_path / "out", parameters=0.8)
    assert record.structure
    assert record.structure.blocks
    assert not record.structure.neurons
    assert any("neurons of this model (mixtral) cannot be removed" in note for note in record.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parameters": 1}, "parameters is how much is left, such as 0.75, 75% or 110M; got 1"),
        ({"parameters": "120 %"}, "got '120 %'"),
        ({"parameters": 0}, "got 0"),
        ({"parameters": "lots"}, "got 'lots'"),
        ({"parameters": "5M"}, "parameters 5,000,000: the model has"),
        ({"parameters": 0.1}, "are left; give at least 0."),
        ({"parameters": 0.8, "neurons": 0.5}, "parameters says how much is left"),
        ({"parameters": 0.8, "blocks": 1}, "parameters says how much is left"),
    ],
)
def test_what_makes_no_sense(source: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    assert said in message(lambda: run(source, tmp_path / "out", **options), UsageError)
    assert not (tmp_path / "out").exists()
