"""Models whose matrices are products of two sparse factors: pruned, stopped, packed, computed with, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NiwakiError, UsageError
from niwaki.layer.patterns import TwoFactors, Unstructured, factors as pattern_module
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import DoubleSparse
from niwaki.models.formats import FACTORS_FILE, Factored, is_product
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import TrainedFactors, trainable
from niwaki.packed import kernels
from niwaki.packed.format import PackedCheckpoint
from niwaki.packed.linear import SparseLinear
from niwaki.packed.matrix import pack
from niwaki.pruning.plan import _chosen_at_once
from support.decoding import both, packed_model
from support.models import edit_json, is_pruned, message, random_tokens, reference, save_model, sparse_model
from support.runs import StopAt, files, run as run_small, tensors


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of these tests are smaller than those of models."""
    monkeypatch.setattr(pattern_module, "_LEAST", 4)


def run(model: Path, out: Path, **changes: Any) -> niwaki.Record:
    return run_small(model, out, **{"solver": "double-sparse:rounds=4", **changes})


def factors_of(out: Path, key: str) -> tuple[Tensor, Tensor]:
    found = load_file(out / FACTORS_FILE)
    return found[f"{key}_left"], found[f"{key}_right"]


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens).logits.float()
    return found


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pruned(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The file has the products of two sparse factors, which are beside it; transformers reads it as ever."""
    model, out = save_model(tmp_path / "model", case, dtype=dtype), tmp_path / "out"
    record = run(model, out)
    before, after = tensors(model), tensors(out)
    pruned = {key for key in before if is_pruned(case, key) and before[key].ndim > 1}
    kept = size = 0
    for key, W in after.items():
        if key not in pruned:
            assert torch.equal(W, before[key])
            continue
        left, right = factors_of(out, key)
        assert left.dtype == right.dtype == W.dtype == dtype
        product = left.float() @ right.float()
        of_matrix = W.mT if case == "gpt2" else W
        assert torch.allclose(product, of_matrix.float(), rtol=torch.finfo(dtype).eps, atol=1e-7)
        assert not torch.equal(W, before[key])
        for factor in (left, right):
            assert not ((factor == 0) & factor.float().signbit()).any()
        here = int(left.count_nonzero() + right.count_nonzero())
        most = sum(TwoFactors(0.5).kept_in_factors(of_matrix.shape[-2:])) * (len(W) if W.ndim == 3 else 1)
        assert 0.97 * most <= here <= most
        kept, size = kept + here, size + W.numel()
    assert record.sparsity == pytest.approx(1 - kept / size)
    assert record.pattern == "two-factors:0.5"
    assert [note for note in record.notes if "products of their two factors" in note]
    assert json.loads((out / "config.json").read_text())["pruning_config"]["pattern"] == "two-factors:0.5"
    tokens = random_tokens(1, 12)
    found, right_logits = logits(niwaki.load(out, "cpu"), tokens), logits(reference(out, dtype), tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (found - right_logits).abs().max() <= tolerance * right_logits.abs().max()
    assert all(matrix.error < 1 for matrix in record.matrices)


def test_the_solver_is_given_by_the_pattern(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    record = run(model, tmp_path / "out", solver=None, sparsity=None, pattern="two-factors:0.5")
    assert record.solver["name"] == "double-sparse"
    assert record.effort is not None
    assert record.effort["name"] == "fast"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_fitted(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Both factors change on their masks, the files have their products, and blocks come nearer to the dense ones."""
    model = save_model(tmp_path / "model", case, dtype=dtype)
    run(model, tmp_path / "fast")
    record = run(model, tmp_path / "out", effort="fast:epochs=8")
    assert all(fit.after < 0.95 * fit.before for fit in record.fits)
    fast, fitted = load_file(tmp_path / "fast" / FACTORS_FILE), load_file(tmp_path / "out" / FACTORS_FILE)
    first = [key for key in fast if ".0." in key]  # later blocks see other inputs
    for key in first:
        assert torch.equal(fast[key] != 0, fitted[key] != 0)
        assert not torch.equal(fast[key], fitted[key])
    found = tensors(tmp_path / "out")
    for key in {key.rpartition("_")[0] for key in fitted}:
        product = fitted[f"{key}_left"].float() @ fitted[f"{key}_right"].float()
        W = found[key].mT if case == "gpt2" else found[key]
        assert torch.allclose(W.float(), product, rtol=torch.finfo(dtype).eps, atol=1e-6)
    niwaki.pack(tmp_path / "out", tmp_path / "packed")


def test_gradients_of_factors(tmp_path: Path) -> None:
    """Against torch's own, through products that it computes."""
    model = StreamedModel(Checkpoint(save_model(tmp_path / "model")), "cpu", "float32")
    stream, generator = model.stream(), torch.Generator().manual_seed(1)
    block, states = next(stream), model.embed(random_tokens(2, 12))

    def loss() -> Tensor:
        return block.run(states.hidden[0], states, 0).square().sum()

    factors = {}
    for matrix in block.matrices:
        rows, columns = matrix.shape
        shapes = (rows, min(rows, columns)), (min(rows, columns), columns)
        factors[matrix.name] = tuple(0.3 * torch.randn(shape, generator=generator) for shape in shapes)
    with trainable(block) as parameters:
        trained = TrainedFactors(block, factors, Factored().project_factors)
        with trained.computing(), torch.enable_grad():
            loss().backward()
        found = trained.gradients()
        assert all(parameter.grad is None for parameter in parameters)
    leaves = [each.clone().requires_grad_() for pair in factors.values() for each in pair]
    with torch.enable_grad():
        for matrix, left, right in zip(block.matrices, leaves[::2], leaves[1::2], strict=True):
            layer = block.module.get_submodule(matrix.name)
            del layer._parameters["weight"]
            layer.weight = left @ right
        expected = torch.autograd.grad(loss(), leaves)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    stream.close()


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize("matrices", [3, 10])
def test_stopped(matrices: int, effort: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", shards=True)
    run(model, tmp_path / "whole", effort=effort)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", effort=effort, progress=StopAt(matrices))
    record = run(model, tmp_path / "out", effort=effort)
    assert bool(record.resumed) == (matrices == 10)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("case", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two masks and two arrays of values, which give the factors back to the bit, and the model but for rounding."""
    model, out, packed = save_model(tmp_path / "model", case, dtype=dtype), tmp_path / "out", tmp_path / "packed"
    run(model, out)
    niwaki.pack(out, packed)
    checkpoint = PackedCheckpoint(packed)
    assert not (packed / "factors").exists()
    stored = [key for key, tensor in checkpoint.index.tensors.items() if tensor.packed]
    assert {key for key in tensors(model) if is_pruned(case, key) and key.endswith("weight")} == set(stored)
    for key in stored:
        for matrix, factor in zip(checkpoint.packed(key), factors_of(out, key), strict=True):
            assert torch.equal(kernels.expand(matrix), factor)
    loaded, tokens = niwaki.load(packed, "cpu"), random_tokens(2, 12)
    layers = [layer for layer in loaded.modules() if isinstance(layer, SparseLinear)]
    assert len(layers) == len(stored)
    assert all(layer.is_product for layer in layers)
    right = logits(reference(out, dtype), tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (logits(loaded, tokens) - right).abs().max() <= tolerance * right.abs().max()
    dense = {key: value for key, value in loaded.state_dict().items() if key in tensors(out)}
    for key, value in tensors(out).items():
        assert torch.allclose(dense[key].float(), value.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    niwaki.unpack(packed, tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "config.json").read_bytes() == (out / "config.json").read_bytes()
    for key, value in tensors(tmp_path / "unpacked").items():
        assert torch.allclose(value.float(), tensors(out)[key].float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.skipif(kernels.library() is None, reason="no native library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_tokens_are_computed_natively(dtype: torch.dtype, tmp_path: Path) -> None:
    run(save_model(tmp_path / "model", "llama grouped", dtype=dtype), tmp_path / "out")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    model, tokens = niwaki.load(tmp_path / "packed", "cpu"), random_tokens(1, 12)
    found, right, steps = both(model, tokens, given=5)
    assert steps == 7 * model.config.num_hidden_layers
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (found - right).abs().max() <= tolerance * right.abs().max()


def test_some_layers_with_factors_and_some_without() -> None:
    """In one block natively; against products in float64."""
    model = packed_model("llama")
    generator = torch.Generator().manual_seed(3)
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, SparseLinear) and name.rpartition(".")[2] in ("k_proj", "o_proj", "up_proj"):
            inner = min(layer.out_features, layer.in_features)
            shapes = (layer.out_features, inner), (inner, layer.in_features)
            left, right = (0.3 * torch.randn(shape, generator=generator) for shape in shapes)
            factored = SparseLinear(pack(left), layer.bias, right=pack(right))
            model.set_submodule(name, factored.eval())
            assert torch.allclose(factored.weight, left @ right, atol=1e-6)
            x = torch.randn(3, layer.in_features, generator=generator)
            y = (x.double() @ (left.double() @ right.double()).T).float()
            assert torch.allclose(factored(x) - (0 if layer.bias is None else layer.bias), y, atol=1e-4)
    found, right_logits, steps = both(model, random_tokens(1, 12), given=5)
    assert steps == 7 * model.config.num_hidden_layers
    assert (found - right_logits).abs().max() <= 1e-5 * right_logits.abs().max()


def test_a_packed_model_that_is_damaged(tmp_path: Path) -> None:
    run(save_model(tmp_path / "model"), tmp_path / "out")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    (file,) = (tmp_path / "packed").glob("packed-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-200] ^= 255
    file.write_bytes(data)
    for call in (lambda: niwaki.load(tmp_path / "packed"), lambda: niwaki.unpack(tmp_path / "packed", tmp_path / "x")):
        assert "is damaged" in message(call, CheckpointError)


def test_weights_that_are_no_product_any_more(tmp_path: Path) -> None:
    run(save_model(tmp_path / "model"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    found = load_file(file)
    key = next(key for key in found if is_pruned("llama", key))
    found[key][0] += 1
    save_file(found, file, {"format": "pt"})
    said = message(lambda: niwaki.pack(tmp_path / "out", tmp_path / "packed"), CheckpointError)
    assert f"{key!r} is not the product of its factors any more" in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"revive": True}, "a product of two factors keeps no zeros"),
        ({"effort": "fast:allocation=owl"}, "allocation=owl does not support two-factors:0.5"),
        ({"mask_from": "wanda"}, "two factors have their own masks"),
        ({"solver": "wanda", "sparsity": None, "pattern": "two-factors:0.5"}, "only the solver double-sparse makes"),
        ({"sparsity": None, "pattern": "2:4"}, "makes two factors, and 2:4 is a pattern of one matrix"),
        ({"sparsity": 0.99}, "fewer than 64 weights for its square factor"),
    ],
)
def test_what_two_factors_cannot_have(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    said = message(lambda: run(model, tmp_path / "out", **changes), NiwakiError)
    assert reason in said
    assert not (tmp_path / "out").exists()


def test_small_matrices_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_module, "_LEAST", 64)
    said = message(lambda: run(save_model(tmp_path / "model"), tmp_path / "out"), NiwakiError)
    assert "self_attn.q_proj" in said
    assert "too small for two-factors:0.5: from 64 on" in said


def test_what_would_make_dense_matrices_of_them(tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    run(model, out)
    options: dict[str, Any] = {"calibration": niwaki.Calibration(random_tokens(4, 24))}
    for call in (
        lambda: niwaki.prune(out, tmp_path / "x", 0.5, **options),
        lambda: niwaki.shrink(out, tmp_path / "x", neurons=0.25, **options),
    ):
        assert "was pruned to two factors" in message(call, UsageError)
    stages: list[Any] = [niwaki.Prune("two-factors:0.5"), niwaki.Quantize("int8")]
    said = message(lambda: niwaki.run(model, tmp_path / "x", stages, **options), UsageError)
    assert said.startswith("stage 2, quantize: quantize would make dense matrices of two sparse factors")
    assert not (tmp_path / "x").exists()


def test_zeros_of_the_model_are_not_kept(tmp_path: Path) -> None:
    """A product has none; the record says so."""
    record = run(sparse_model(tmp_path / "model", sparsity=0.3), tmp_path / "out")
    assert any("weights that were zero in the model no longer are" in note for note in record.notes)


@pytest.mark.parametrize("sparsity", [0.3, 0.7])
def test_what_zeros_cost(sparsity: float, tmp_path: Path) -> None:
    """As many weights in one matrix: square ones, whose second mask takes the most bytes, get fewer zeros for it."""
    matrices = StreamedModel(Checkpoint(save_model(tmp_path / "model", "llama")), "cpu").matrices(0)
    for matrix in matrices:
        pattern = TwoFactors(sparsity)
        chosen = _chosen_at_once(pattern, matrix)
        rows, columns = matrix.shape
        assert isinstance(chosen, Unstructured)
        beside = min(rows, columns) ** 2 / 16 / (rows * columns)
        assert chosen.sparsity == pytest.approx(sparsity + beside, abs=2 / matrix.size)
        assert _chosen_at_once(Unstructured(sparsity), matrix) == Unstructured(sparsity)


def test_times_a_power_of_two() -> None:
    """Of odd ones as well: the product is what it should be."""
    X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = LayerProblem(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).double(), Gram(X.T @ X / 64))
    solution = DoubleSparse(rounds=2)(problem, TwoFactors(0.2))
    larger = solution.times(7, problem.times(7))
    assert larger.factors
    assert torch.equal(larger.W, 128 * solution.W)
    assert torch.allclose(larger.factors[0] @ larger.factors[1], larger.W, rtol=1e-12, atol=0)
    assert larger.error == pytest.approx(solution.error)


def test_the_config_is_read(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    edit_json(model / "config.json", pruning_config={"pattern": None})
    assert run(model, tmp_path / "out", solver="magnitude").sparsity == 0.5


def test_packed_again(tmp_path: Path) -> None:
    """What unpack writes has the factors, and is packed to the same tensors again."""
    run(save_model(tmp_path / "model"), tmp_path / "out")
    for source, out in (("out", "packed"), ("unpacked", "again")):
        niwaki.pack(tmp_path / source, tmp_path / out)
        if source == "out":
            niwaki.unpack(tmp_path / "packed", tmp_path / "unpacked")
    one, other = (load_file(tmp_path / name / FACTORS_FILE) for name in ("out", "unpacked"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    (first,), (second,) = ((tmp_path / name).glob("packed-*.safetensors") for name in ("packed", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("what", ["all", "one"])
def test_factors_that_are_gone(what: str, tmp_path: Path) -> None:
    run(save_model(tmp_path / "model"), tmp_path / "out")
    file = tmp_path / "out" / FACTORS_FILE
    if what == "all":
        file.unlink()
    else:
        found = load_file(file)
        del found[next(key for key in found if key.endswith("_left"))]
        save_file(found, file, {"format": "pt"})
    said = message(lambda: niwaki.pack(tmp_path / "out", tmp_path / "packed"), CheckpointError)
    gone = "config.json says that matrices are products of two factors, and factors/factors.safetensors is not there"
    assert (gone if what == "all" else f"{file} has no factors of") in said
    assert not (tmp_path / "packed").exists()


def test_some_blocks(tmp_path: Path) -> None:
    """The others are packed as they are."""
    run(save_model(tmp_path / "model", "llama grouped"), tmp_path / "out", blocks="1:2")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    stored = PackedCheckpoint(tmp_path / "packed").index.tensors
    assert {key.split(".")[2] for key, tensor in stored.items() if tensor.inner} == {"1"}


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "gpt_oss")
    said = message(lambda: run(model, tmp_path / "out"), NiwakiError)
    assert "has the matrices of all experts, which cannot become two factors" in said
    assert not (tmp_path / "out").exists()


def test_in_half_precision(tmp_path: Path) -> None:
    """Nothing overflows, also where few weights are left."""
    model = save_model(tmp_path / "model", dtype=torch.float16)
    run(model, tmp_path / "out", sparsity=0.7, solver="double-sparse")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    assert (
        max(float(factor.float().abs().max()) for factor in load_file(tmp_path / "out" / FACTORS_FILE).values()) < 1e3
    )


def test_products_on_other_processors() -> None:
    """Sums in another order are the same product; another matrix is not."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    W = (left.double() @ right.double()).float()
    assert is_product(W, (left, right))
    assert is_product((left[:, torch.arange(1023, -1, -1)] @ right.flip(0)), (left, right))
    W[3] += 1
    assert not is_product(W, (left, right))


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    run(save_model(tmp_path / "model"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "each made the product of two sparse factors" in card
    assert "Zeros are stored" not in card
    assert "fewer weights" in card


def test_factors_that_do_not_fit() -> None:
    one, other = (pack(torch.ones(shape)) for shape in ((64, 64), (128, 64)))
    with pytest.raises(UsageError, match="cannot be multiplied"):
        SparseLinear(one, right=other)
