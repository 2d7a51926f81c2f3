"""What a look at the dense model decides, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import Planning
from niwaki.errors import OutputError
from niwaki.layer.patterns import parse_pattern
from niwaki.models.processes import World
from niwaki.models.sensitivity import sensitivities
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.plan import Plan, plan
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from support.covering import covered
from support.models import is_pruned, linear_inputs, message, random_tokens, reference, save_model
from support.runs import Diary, files, run as run_small, stopped, tensors, zeros

TOKENS = random_tokens(24, 24)


def run(model: Path, out: Path, effort: str, **changes: Any) -> Record:
    return run_small(model, out, **{"effort": effort, "calibration": TOKENS, "measure": "none", **changes})


def by_key(out: Path, case: str = "llama") -> dict[str, float]:
    """The sparsity of each matrix that is written."""
    found = {key: value for key, value in tensors(out).items() if is_pruned(case, key)}
    return {key: zeros(value) / value.numel() for key, value in found.items()}


def change(model: Path, factor: float, *parts: str, place: Any = ...) -> None:
    """Multiplies what is at ``place`` of all tensors whose keys hold one of ``parts``."""
    values = load_file(model / "model.safetensors")
    for key, value in values.items():
        if any(part in key for part in parts):
            value[place] *= factor
    save_file(values, model / "model.safetensors", metadata={"format": "pt"})


@covered
@pytest.mark.parametrize("case", ["llama grouped", "mixtral", "gpt2", "phi3", "gpt_oss"])
@pytest.mark.parametrize("effort", ["fast:allocation=loss", "fast:allocation=error"])
@pytest.mark.slow
def test_the_total_is_exact(tmp_path: Path, case: str, effort: str) -> None:
    model = save_model(tmp_path / "model", case)
    record = run(model, tmp_path / "out", effort, solver="sparsegpt", sparsity=0.6)
    weights = sum(rows * columns for rows, columns in (m.shape for m in record.matrices))
    counted = sum(zeros(v) for k, v in tensors(tmp_path / "out").items() if is_pruned(case, k))
    assert counted == round(0.6 * weights)
    assert len({round(m.sparsity, 3) for m in record.matrices}) > 1


@pytest.mark.slow
def test_what_the_model_hardly_hears_is_pruned_most(tmp_path: Path) -> None:
    """A block whose outputs are scaled down to a thousandth, and a matrix of another."""
    model = save_model(tmp_path / "model", "llama grouped")
    change(model, 1e-3, "layers.1.self_attn.o_proj", "layers.1.mlp.down_proj", "0.self_attn.v_proj")
    run(model, tmp_path / "out", "fast:allocation=loss")
    found = by_key(tmp_path / "out")
    faint = [s for k, s in found.items() if "layers.1." in k or "0.self_attn.v_proj" in k]
    heard = [s for k, s in found.items() if "layers.2.mlp" in k]
    assert min(faint) > 0.6
    assert max(heard) < 0.4
    # Relative errors of outputs do not see it.
    run(model, tmp_path / "errors", "fast:allocation=error")
    found = by_key(tmp_path / "errors")
    assert found["model.layers.1.mlp.down_proj.weight"] == pytest.approx(
        found["model.layers.2.mlp.down_proj.weight"], abs=0.1
    )


def test_rows_that_matter_keep_more_weights(tmp_path: Path, model: Path) -> None:
    """Against the rows of the matrix whose outputs another one scales down."""
    change(model, 1e-2, "layers.0.mlp.down_proj", place=(slice(None), slice(None, None, 2)))  # of every other neuron
    kept = {}
    for effort in ("fast", "fast:importance=1"):
        run(model, tmp_path / effort, effort, sparsity=None, pattern="unstructured:0.5")
        up = tensors(tmp_path / effort)["model.layers.0.mlp.up_proj.weight"]
        kept[effort] = [float((up[start::2] != 0).float().mean()) for start in (0, 1)]
        assert zeros(up) == up.numel() // 2
    assert kept["fast"] == pytest.approx([0.5, 0.5], abs=0.1)
    assert kept["fast:importance=1"][0] < 0.1 < 0.9 < kept["fast:importance=1"][1]


def test_weights_are_those_of_the_weighted_problem(tmp_path: Path, model: Path) -> None:
    """What importance does to rows is undone: Wanda's weights stay as they were, errors are those of the outputs."""
    record = run(model, tmp_path / "out", "fast:importance=0.5")
    before, after = tensors(model), tensors(tmp_path / "out")
    for key, value in after.items():
        assert torch.allclose(value, torch.where(value != 0, before[key], 0.0), rtol=1e-6, atol=0)
    q = next(m for m in record.matrices if m.name.endswith("q_proj"))
    key, X = "model.layers.0.self_attn.q_proj.weight", linear_inputs(reference(model), 0, TOKENS)["self_attn.q_proj"]
    X = X.double()
    dense, sparse = X @ before[key].double().T, X @ after[key].double().T
    assert q.error == pytest.approx(float((dense - sparse).square().sum() / dense.square().sum()), rel=1e-4)


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
@pytest.mark.slow
def test_patterns_of_hardware_stay(tmp_path: Path, model: Path, pattern: str) -> None:
    expected = run(model, tmp_path / "uniform", "fast", sparsity=None, pattern=pattern)
    found = run(model, tmp_path / "out", "fast:allocation=loss:importance=0.5", sparsity=None, pattern=pattern)
    assert [m.sparsity for m in found.matrices] == [m.sparsity for m in expected.matrices] == [0.5] * 14
    for key, value in tensors(tmp_path / "out").items():
        assert torch.equal(value, tensors(tmp_path / "uniform")[key])


@pytest.mark.slow
def test_the_same_in_each_row_takes_part(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama grouped")
    record = run(model, tmp_path / "out", "fast:allocation=loss", sparsity=None, pattern="per-row:0.5")
    sparsities = [m.sparsity for m in record.matrices]
    assert record.sparsity == pytest.approx(0.5, abs=0.01)
    assert max(sparsities) - min(sparsities) > 0.1


def test_some_blocks_only(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama grouped")
    record = run(model, tmp_path / "out", "fast:allocation=loss:importance=0.5", blocks=(1, 3))
    assert record.sparsity == pytest.approx(0.5, abs=1e-4)
    assert {m.block for m in record.matrices} == {1, 2}
    assert [s for key, s in by_key(tmp_path / "out").items() if "layers.0." in key] == [0.0] * 7


@pytest.mark.parametrize("effort", ["fast:allocation=loss", "balanced:synthetic=0", "fast:allocation=error"])
@pytest.mark.slow
def test_a_run_that_was_stopped_keeps_its_plan(tmp_path: Path, effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model", "llama grouped", shards=True)
    run(model, tmp_path / "whole", effort)
    expected = files(tmp_path / "whole")
    assert not any("plan" in name for name in expected)
    run(model, tmp_path / "again", effort)
    assert files(tmp_path / "again") == expected
    little = run(model, tmp_path / "little", effort, max_memory=1)
    weights = {name: value for name, value in expected.items() if name.endswith(".safetensors")}
    assert {name: files(tmp_path / "little")[name] for name in weights} == weights
    assert little.sparsity == pytest.approx(0.5, abs=1e-4)
    stopped(model, tmp_path / "out", 8, effort=effort, calibration=TOKENS, measure="none")
    monkeypatch.setattr("niwaki.pruning.walk.plan", None)  # it is not made again
    assert run(model, tmp_path / "out", effort).resumed == [1]
    assert files(tmp_path / "out") == expected


def test_a_run_that_is_stopped_while_it_plans_leaves_nothing(tmp_path: Path, model: Path) -> None:

    class Stop(Progress):
        def stage(self, block: int, name: str, steps: int) -> None:
            if name == "allocation" and block == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", "fast:allocation=loss", progress=Stop())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_steps(tmp_path: Path) -> None:
    """As many as were announced."""
    diary = Diary()
    run(save_model(tmp_path / "model"), tmp_path / "out", "fast:allocation=loss", progress=diary)
    first = [(0, "sensitivity", 4, 4), (0, "allocation", 1, 1), (1, "allocation", 1, 1)]
    assert diary.stages()[:3] == first
    assert [name for _, name, _, _ in diary.stages()[3:]] == ["capture", "solve", "advance"] * 2


def test_a_plan_on_disk(tmp_path: Path) -> None:
    made = Plan({(0, "a.b"): 3, (11, "c d"): 4}, {(0, "a.b"): torch.rand(3), (11, "c d"): torch.rand(2)})
    digest = made.save(tmp_path / "plan")
    found = Plan.load(tmp_path / "plan", digest)
    assert found
    assert found.zeros == made.zeros
    assert found.importance.keys() == made.importance.keys()
    assert all(torch.equal(found.importance[key], made.importance[key]) for key in made.importance)
    assert Plan.load(tmp_path / "empty", Plan().save(tmp_path / "empty")) == Plan()
    assert Plan.load(tmp_path / "empty", digest) is None
    assert Plan.load(tmp_path / "none", digest) is None
    assert "--restart" in message(lambda: Plan().save(tmp_path / "plan", digest), OutputError)


def test_importance_is_a_power_of_the_sensitivity(tmp_path: Path) -> None:
    streamed = StreamedModel(Checkpoint(save_model(tmp_path / "model")), "cpu")
    usual = parse_pattern("unstructured:0.5")
    found = plan(streamed, Planning(importance=0.5, pilot=0.25), lambda _: usual, TOKENS, "auto", World(), Progress())
    assert not found.zeros
    raw = sensitivities(streamed, TOKENS[::4])
    assert len(found.importance) == 14
    for (block, name), weights in found.importance.items():
        expected = (raw[block][name] / raw[block][name].mean()).clamp(min=1e-4) ** 0.5
        torch.testing.assert_close(weights**2, expected / expected.mean())
