"""Models whose matrices are products of two sparse factors, as they are or on a grid of 8 bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NiwakiError, UsageError
from niwaki.evaluation.inspect import opened
from niwaki.layer.grid import Grid
from niwaki.layer.patterns import TwoFactors, Unstructured, factors as pattern_module
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import DoubleSparse
from niwaki.models.formats import FACTORS_FILE, Factored, OnGrid, WeightFormat, format_of, is_product
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import TrainedFactors, trainable
from niwaki.packed import kernels
from niwaki.packed.format import PackedCheckpoint, PackedTensor
from niwaki.packed.linear import SparseLinear
from niwaki.packed.matrix import pack
from niwaki.pruning.plan import _chosen_at_once
from support.arguments import arguments
from support.covering import covered, some
from support.decoding import both, packed_model
from support.models import edit_json, is_pruned, message, random_tokens, reference, save_model, sparse_model
from support.runs import files, run as run_small, stopped as stopped_small, tensors

INT8 = Grid(8)
#: Of the tensors of one matrix, in the order of its parts; those on no grid have no scales.
PARTS = ("left", "right", "left_scale", "right_scale")
#: What a run is asked for; the grid takes bytes that zeros have to make up for.
OPTIONS: dict[str | None, dict[str, Any]] = {None: {"sparsity": 0.5}, "int8": {"sparsity": 0.4, "quantize": "int8"}}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_grid = pytest.mark.parametrize("grid", OPTIONS, ids=str)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of these tests are smaller than those of models."""
    monkeypatch.setattr(pattern_module, "_LEAST", 4)


def given(grid: str | None, changes: dict[str, Any]) -> dict[str, Any]:
    return {"solver": "double-sparse:rounds=4", **OPTIONS[grid], **changes}


def run(model: Path, out: Path, grid: str | None = None, **changes: Any) -> niwaki.Record:
    return run_small(model, out, **given(grid, changes))


def stopped(model: Path, out: Path, matrices: int, grid: str | None = None, **changes: Any) -> None:
    stopped_small(model, out, matrices, **given(grid, changes))


def parts_of(out: Path, key: str) -> list[Tensor]:
    found = load_file(out / FACTORS_FILE)
    return [found[name] for part in PARTS if (name := f"{key}_{part}") in found]


def keys_of(out: Path) -> set[str]:
    """The matrices that have factors."""
    return {key.removesuffix("_left") for key in load_file(out / FACTORS_FILE) if key.endswith("_left")}


def check_parts(left: Tensor, right: Tensor, *scales: Tensor) -> None:
    """No zero is -0.0, and on a grid all is q s in its dtype, with a whole q of 8 bits, from float64."""
    for factor in (left, right):
        assert not ((factor == 0) & factor.float().signbit()).any()
    for factor, of_rows in zip((left, right), scales, strict=True) if scales else ():
        assert of_rows.shape == (len(factor), 1)
        assert of_rows.dtype == factor.dtype
        whole = (factor.double() / of_rows.double()).round()
        assert -128 <= float(whole.min()) <= float(whole.max()) <= 127
        # A product of numbers in float32 rounded once, as in the dtype itself.
        assert torch.equal((whole.float() * of_rows.float()).to(factor.dtype), factor)


def room(rows: int, columns: int) -> int:
    """How many values on the grid take the bits of one matrix: 8 for a value, one for each place, 16 for a scale."""
    inner = min(rows, columns)
    of_one = 8 * (rows * columns - round(0.4 * rows * columns)) + rows * columns + 16 * rows
    beside = rows * inner + inner * columns + 16 * (rows + inner)
    return (of_one - beside) // 8


@torch.no_grad()
def check_logits(model: Any, out: Path, dtype: torch.dtype) -> None:
    """``model`` computes what transformers does with the files."""
    tokens = random_tokens(2, 12)
    found, right = model(tokens).logits.float(), reference(out, dtype)(tokens).logits.float()
    assert (found - right).abs().max() <= TOLERANCE[dtype] * right.abs().max()


@covered
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
@each_dtype
@each_grid
def test_pruned(grid: str | None, dtype: torch.dtype, case: str, tmp_path: Path) -> None:
    """The file has the products of two sparse factors, which are beside it; transformers reads it as ever."""
    model, out = save_model(tmp_path / "model", case, dtype=dtype), tmp_path / "out"
    record = run(model, out, grid)
    before, after = tensors(model), tensors(out)
    pruned = {key for key in before if is_pruned(case, key) and before[key].ndim > 1}
    assert load_file(out / FACTORS_FILE).keys() == {
        f"{key}_{part}" for key in pruned for part in PARTS[: 4 if grid else 2]
    }
    kept = size = 0
    for key, W in after.items():
        if key not in pruned:
            assert torch.equal(W, before[key])
            continue
        assert not torch.equal(W, before[key])
        left, right, *scales = parts_of(out, key)
        assert left.dtype == right.dtype == W.dtype == dtype
        check_parts(left, right, *scales)
        of_matrix = W.mT if case == "gpt2" else W
        assert torch.allclose(left.float() @ right.float(), of_matrix.float(), rtol=torch.finfo(dtype).eps, atol=1e-7)
        here = int(left.count_nonzero() + right.count_nonzero())
        most = room(*of_matrix.shape) if grid else sum(TwoFactors(0.5).kept_in_factors(of_matrix.shape[-2:]))
        assert (0.95 if grid else 0.97) * most <= here <= most
        kept, size = kept + here, size + W.numel()
    assert record.sparsity == pytest.approx(1 - kept / size)
    assert all(matrix.error < 1 for matrix in record.matrices)
    expected = ("two-factors:0.4:int8", "int8") if grid else ("two-factors:0.5", None)
    config = json.loads((out / "config.json").read_text())["pruning_config"]
    assert (record.pattern, record.quantization) == (config["pattern"], config.get("quantization")) == expected
    assert [note for note in record.notes if "products of their two factors" in note]
    assert not [note for note in record.notes if "stored as usual" in note]
    assert ("before rounding" in record.rounding) == bool(grid)
    assert not (out / "quantization").exists()
    check_logits(niwaki.load(out, "cpu"), out, dtype)


def test_the_solver_is_given_by_the_pattern(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    record = run(model, tmp_path / "out", solver=None, sparsity=None, pattern="two-factors:0.5")
    assert (record.solver["name"], record.effort["name"]) == ("double-sparse", "fast")


def test_rounding_changes_little(tmp_path: Path) -> None:
    """Of the error, and the record has both."""
    for matrix in run(save_model(tmp_path / "model"), tmp_path / "out", "int8").matrices:
        assert matrix.error == pytest.approx(float(matrix.stats["error_before_rounding"]), rel=0.05)
        assert matrix.error != matrix.stats["error_before_rounding"]
        assert int(matrix.stats["rounded_to_zero"]) >= 0


def test_what_is_said_of_it(tmp_path: Path) -> None:
    model, pattern = save_model(tmp_path / "model"), "two-factors:0.4:int8"
    for name, grid in (("plain", None), ("grid", "int8")):
        run(model, tmp_path / name, grid)
    plain, on_grid = ((tmp_path / name / "README.md").read_text() for name in ("plain", "grid"))
    assert "each made the product of two sparse factors" in plain
    assert "Zeros are stored" not in plain
    assert "fewer weights" in plain
    assert f"| pattern | {pattern} |" in on_grid
    assert "| grid of the weights | int8: error" in on_grid
    assert opened(tmp_path / "grid").checkpoint.pruning.pattern == pattern
    niwaki.report(tmp_path / "grid")
    assert pattern in (tmp_path / "grid" / "report.html").read_text()


@pytest.mark.parametrize(
    ("grid", "dtype", "case"),
    [
        (None, torch.float32, "gpt2"),
        (None, torch.bfloat16, "llama"),
        ("int8", torch.float32, "llama"),
        ("int8", torch.bfloat16, "gpt2"),
    ],
    ids=str,
)
def test_fitted(grid: str | None, dtype: torch.dtype, case: str, tmp_path: Path) -> None:
    """Factors change on their masks, with the same scales, products with them, and blocks come nearer to dense ones."""
    model, out = save_model(tmp_path / "model", case, dtype=dtype), tmp_path / "out"
    run(model, tmp_path / "fast", grid)
    record = run(model, out, grid, effort="fast:epochs=8")
    assert all(fit.after < (0.98 if grid else 0.95) * fit.before for fit in record.fits)
    fast, fitted = load_file(tmp_path / "fast" / FACTORS_FILE), load_file(out / FACTORS_FILE)
    for key in (key for key in fast if ".0." in key):  # later blocks see other inputs
        assert torch.equal(fast[key] != 0, fitted[key] != 0)
        assert torch.equal(fast[key], fitted[key]) == key.endswith("scale")
    found = tensors(out)
    for key in keys_of(out):
        left, right, *scales = parts_of(out, key)
        check_parts(left, right, *scales)
        W = found[key].mT if case == "gpt2" else found[key]
        assert torch.allclose(W.float(), left.float() @ right.float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    niwaki.pack(out, tmp_path / "packed")


@each_grid
def test_gradients(grid: str | None, tmp_path: Path) -> None:
    """Against torch's own, through products of the factors that the block computes with; settled, it keeps these."""
    model = StreamedModel(Checkpoint(save_model(tmp_path / "model")), "cpu", "float32")
    stream, generator = model.stream(), torch.Generator().manual_seed(1)
    block, states = next(stream), model.embed(random_tokens(2, 12))

    def loss() -> Tensor:
        return block.run(states.hidden[0], states, 0).square().sum()

    parts, computed = {}, {}
    for matrix in block.matrices:
        (rows, columns), inner = matrix.shape, min(matrix.shape)
        factors = [0.3 * torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns))]
        factors[0][:, 3] = 0
        factors[1][2, 2] = 1e-6  # which is not to become 0
        parts[matrix.name] = computed[matrix.name] = factors
        if grid:
            parts[matrix.name] = [*factors, *(torch.full((len(factor), 1), 0.02) for factor in factors)]
            codes = [(factor / 0.02).round().clamp(-128, 127) for factor in factors]
            computed[matrix.name] = [
                0.02 * torch.where(code == 0, factor.sign(), code) for code, factor in zip(codes, factors, strict=True)
            ]
            assert computed[matrix.name][1][2, 2] == 0.02
    with trainable(block) as parameters:
        trained = TrainedFactors(block, parts, Factored(INT8 if grid else None).project_factors)
        with trained.computing(), torch.enable_grad():
            loss().backward()
        found = trained.gradients()
        assert all(parameter.grad is None for parameter in parameters)
        trained.settle()
        settled = trained.parts
    leaves = [each.clone().requires_grad_() for pair in computed.values() for each in pair]
    with torch.enable_grad():
        for matrix, left, right in zip(block.matrices, leaves[::2], leaves[1::2], strict=True):
            layer = block.module.get_submodule(matrix.name)
            assert torch.allclose(block.module.get_parameter(matrix.parameter), left @ right, atol=1e-5)
            del layer._parameters["weight"]
            layer.weight = left @ right
        expected = torch.autograd.grad(loss(), leaves)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    for name, pair in computed.items():
        for kept, wanted in zip(settled[name], [*pair, *parts[name][2:]], strict=True):
            assert torch.allclose(kept, wanted, rtol=1e-6, atol=0)
    stream.close()


@covered
@pytest.mark.parametrize("matrices", [3, 10])
@pytest.mark.parametrize("effort", ["fast", "balanced"])
@each_grid
def test_stopped(grid: str | None, effort: str, matrices: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", shards=True)
    run(model, tmp_path / "whole", grid, effort=effort)
    stopped(model, tmp_path / "out", matrices, grid, effort=effort)
    record = run(model, tmp_path / "out", grid, effort=effort)
    assert bool(record.resumed) == (matrices == 10)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("part", some(PARTS, 2))
def test_a_part_that_was_damaged_is_made_again(part: str, tmp_path: Path) -> None:
    """Of a run that was stopped: each part of a matrix counts."""
    model = save_model(tmp_path / "model")
    run(model, tmp_path / "whole", "int8")
    stopped(model, tmp_path / "out", 10, "int8")
    (file,) = tmp_path.glob(f".*/**/{FACTORS_FILE}")
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    key = next(key for key in header if ".0." in key and key.endswith(part))
    data[8 + size + header[key]["data_offsets"][0]] ^= 1
    file.write_bytes(data)
    run(model, tmp_path / "out", "int8")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("left", 1e-3, "factors on disk that are not on their grid int8"),
        ("right_scale", 1e-2, "factors on disk that are not on their grid int8"),
        ("left_scale", math.inf, "has scales that are 0 or not finite"),
    ],
)
def test_it_is_read_back(part: str, change: float, said: str, tmp_path: Path) -> None:
    """What is not on the grid, or no scale, is an error of the run."""
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    run(model, out, "int8")
    streamed = StreamedModel(Checkpoint(out), "cpu")
    matrices, how = streamed.matrices(), Factored(INT8)
    zeros = {matrix.key: how.zeros(matrix.read(Checkpoint(out)), parts_of(out, matrix.key)) for matrix in matrices}
    how.verify(out, Checkpoint(out), matrices, zeros)
    key, found = matrices[0].key, load_file(out / FACTORS_FILE)
    changed = found[f"{key}_{part}"]
    place = (0, int(changed[0].nonzero()[0]))
    changed[place] += change * changed[place].abs()
    save_file(found, out / FACTORS_FILE, {"format": "pt"})
    # Products are looked at first, and are the same but for rounding only where little has changed.
    message_of = message(lambda: how.verify(out, Checkpoint(out), matrices, zeros), NiwakiError)
    assert said in message_of or "is not on disk as the product of its factors" in message_of
    if "scale" in part:
        assert said in message_of


def test_the_format_of_a_checkpoint(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    assert type(format_of(Checkpoint(model))) is WeightFormat
    for grid, changes, expected in (
        ("int8", {}, Factored(INT8)),
        (None, {}, Factored()),
        ("int8", {"solver": "magnitude"}, OnGrid(INT8)),
    ):
        out = tmp_path / str(expected)
        run(model, out, grid, **changes)
        assert format_of(Checkpoint(out)) == expected


@covered
@pytest.mark.parametrize("case", ["llama", "gpt2"])
@each_dtype
@each_grid
def test_packed(grid: str | None, dtype: torch.dtype, case: str, tmp_path: Path) -> None:
    """Masks, values and scales, which give factors back to the bit, the model but for rounding, and the same file."""
    model, out, packed = save_model(tmp_path / "model", case, dtype=dtype), tmp_path / "out", tmp_path / "packed"
    run(model, out, grid)
    niwaki.pack(out, packed)
    assert not (packed / "factors").exists()
    checkpoint = PackedCheckpoint(packed)
    stored = {key: tensor for key, tensor in checkpoint.index.tensors.items() if tensor.packed}
    assert {key for key in tensors(model) if is_pruned(case, key) and key.endswith("weight")} == stored.keys()
    (file,) = packed.glob("packed-*.safetensors")
    written = load_file(file)
    for key, tensor in stored.items():
        assert (tensor.bits, tensor.groups, tensor.groups_right) == ((8, 1, 1) if grid else (0, 0, 0))
        left, right, *scales = parts_of(out, key)
        for matrix, factor in zip(checkpoint.packed(key), (left, right), strict=True):
            assert torch.equal(kernels.expand(matrix), factor)
        for side, of_rows in zip(PARTS, scales, strict=False):
            assert written[f"{key}.{side}.values"].dtype == torch.int8
            assert torch.equal(written[f"{key}.{side}.scales"], of_rows)
    loaded = niwaki.load(packed, "cpu")
    layers = [layer for layer in loaded.modules() if isinstance(layer, SparseLinear)]
    assert len(layers) == len(stored)
    assert all(layer.is_product and (layer.values.dtype == torch.int8) == bool(grid) for layer in layers)
    check_logits(loaded, out, dtype)
    unpacked, again = tmp_path / "unpacked", tmp_path / "again"
    niwaki.unpack(packed, unpacked)
    for found in (loaded.state_dict(), tensors(unpacked)):
        for key, value in tensors(out).items():
            assert torch.allclose(found[key].float(), value.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert (unpacked / "config.json").read_bytes() == (out / "config.json").read_bytes()
    before, after = (load_file(path / FACTORS_FILE) for path in (out, unpacked))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    niwaki.pack(unpacked, again)
    assert (again / file.name).read_bytes() == file.read_bytes()


def test_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale for each 64 inputs of both factors, in a model with matrices that have them; and others are refused."""
    monkeypatch.setattr(pattern_module, "_LEAST", 64)
    model, out, packed = tmp_path / "model", tmp_path / "out", tmp_path / "packed"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(model)
    run(model, out, "int8", quantize="int8:64")
    niwaki.pack(out, packed)
    checkpoint = PackedCheckpoint(packed)
    shapes = set()
    for key, tensor in checkpoint.index.tensors.items():
        if not tensor.packed:
            continue
        rows, columns = tensor.shape
        shapes.add((tensor.groups, tensor.groups_right))
        assert (tensor.groups, tensor.groups_right) == (min(rows, columns) // 64, columns // 64)
        for matrix, factor in zip(checkpoint.packed(key), parts_of(out, key), strict=False):
            assert torch.equal(kernels.expand(matrix), factor)
    assert len(shapes) > 1
    niwaki.unpack(packed, tmp_path / "unpacked")
    before, after = (load_file(path / FACTORS_FILE) for path in (out, tmp_path / "unpacked"))
    assert all(torch.equal(before[key], after[key]) for key in before)
    said = message(lambda: run(model, tmp_path / "x", "int8", quantize="int8:128"), UsageError)
    assert "64 inputs cannot be divided into groups of 128" in said


@pytest.mark.skipif(kernels.library() is None, reason="no native library")
@each_dtype
@each_grid
def test_single_tokens_are_computed_natively(grid: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    run(save_model(tmp_path / "model", "llama grouped", dtype=dtype), tmp_path / "out", grid)
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    model, tokens = niwaki.load(tmp_path / "packed", "cpu"), random_tokens(1, 12)
    found, right, steps = both(model, tokens, given=5)
    assert steps == 7 * model.config.num_hidden_layers
    assert (found - right).abs().max() <= TOLERANCE[dtype] * right.abs().max()


def test_layers_of_all_kinds_in_one_block() -> None:
    """Two factors, of which both, one or none have whole numbers, beside single matrices; against float64."""
    model = packed_model("llama")
    generator = torch.Generator().manual_seed(3)
    grids = {"k_proj": (True, True), "o_proj": (True, False), "up_proj": (False, True), "down_proj": (False, False)}
    for name, layer in [*model.named_modules()]:
        kind = name.rpartition(".")[2]
        if isinstance(layer, SparseLinear) and kind in grids:
            inner = min(layer.out_features, layer.in_features)
            shapes = (layer.out_features, inner), (inner, layer.in_features)
            packed, dense = [], []
            for shape, whole in zip(shapes, grids[kind], strict=True):
                codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
                codes[torch.rand(shape, generator=generator) < 0.5] = 0
                scales = 0.002 + 0.002 * torch.rand(shape[0], 1, generator=generator)
                W = codes.float() * scales
                packed.append(pack(W, codes, scales) if whole else pack(W))
                dense.append(W.double())
            factored = SparseLinear(packed[0], layer.bias, right=packed[1])
            model.set_submodule(name, factored.eval())
            product = dense[0] @ dense[1]
            assert torch.allclose(factored.weight, product.float(), atol=1e-6)
            for count in (1, 3, 40):  # by kernels, and by torch
                x = torch.randn(count, layer.in_features, generator=generator)
                y = (x.double() @ product.T).float()
                assert torch.allclose(factored(x) - (0 if layer.bias is None else layer.bias), y, atol=1e-4)
    found, right, steps = both(model, random_tokens(1, 12), given=5)
    assert steps == 7 * model.config.num_hidden_layers
    assert (found - right).abs().max() <= 1e-5 * right.abs().max()


def test_factors_that_do_not_fit() -> None:
    one, other = (pack(torch.ones(shape)) for shape in ((64, 64), (128, 64)))
    with pytest.raises(UsageError, match="cannot be multiplied"):
        SparseLinear(one, right=other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 4}, "is not a product of two factors here"),
        ({"groups_right": 0}, "values of 8 bits cannot have 0 scales for a row"),
        ({"groups": 0}, "values of 8 bits cannot have 0 scales for a row"),
        ({"bits": 0}, "values of 0 bits cannot have 1 scales for a row"),
        ({"groups": 3}, "rows of 128 columns cannot have 3 scales"),
        ({"groups_right": 3}, "rows of 256 columns cannot have 3 scales"),
        ({"inner": 0, "count_right": 0}, "cannot have inner columns, or values or scales of a right one"),
    ],
)
def test_tensors_that_there_cannot_be(changes: dict[str, Any], said: str) -> None:
    what = {"file": "packed.safetensors", "dtype": "BF16", "shape": (128, 256), "packed": True, "transposed": False}
    numbers = {"count": 7, "bits": 8, "groups": 1, "inner": 128, "count_right": 9, "groups_right": 1}
    values: dict[str, Any] = {**what, **numbers, "sha256": ""}
    PackedTensor(**values).check()
    with pytest.raises(ValueError, match=said):
        PackedTensor(**{**values, **changes}).check()


def test_a_packed_model_that_is_damaged(tmp_path: Path) -> None:
    run(save_model(tmp_path / "model"), tmp_path / "out")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    (file,) = (tmp_path / "packed").glob("packed-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-200] ^= 255
    file.write_bytes(data)
    for call in (lambda: niwaki.load(tmp_path / "packed"), lambda: niwaki.unpack(tmp_path / "packed", tmp_path / "x")):
        assert "is damaged" in message(call, CheckpointError)


# What is refused


@pytest.mark.parametrize(
    ("grid", "what", "said"),
    [
        (None, "all", f"config.json says that matrices are products of two factors, and {FACTORS_FILE} is not there"),
        (None, "no left", f"{FACTORS_FILE} has no factors of"),
        ("int8", "no left_scale", f"{FACTORS_FILE} has no factors of"),
        (None, "up_proj.weight", "is not the product of its factors any more"),
        ("int8", "left", "has factors that are not on int8; prune it again"),
        ("int8", "right", "has factors that are not on int8; prune it again"),
        ("int8", "right_scale", "has factors that are not on int8; prune it again"),
    ],
)
def test_files_that_have_changed(grid: str | None, what: str, said: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(save_model(tmp_path / "model"), out, grid)
    file = out / ("model.safetensors" if what == "up_proj.weight" else FACTORS_FILE)
    if what == "all":
        file.unlink()
    else:
        found = load_file(file)
        key = next(key for key in found if key.endswith(what.removeprefix("no ")))
        if what.startswith("no "):
            del found[key]
        elif what == "up_proj.weight":
            found[key][0] += 1
        else:  # little enough for the product to be the same but for rounding
            found[key][found[key] != 0] *= 1.01 if "scale" in what else 1 + 2.0**-23
        save_file(found, file, {"format": "pt"})
    assert said in message(lambda: niwaki.pack(out, tmp_path / "packed"), CheckpointError)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("grid", "changes", "said"),
    [
        (None, {"revive": True}, "a product of two factors keeps no zeros"),
        (None, {"mask_from": "wanda"}, "two factors have their own masks"),
        (
            None,
            {"solver": "wanda", "sparsity": None, "pattern": "two-factors:0.5"},
            "only the solver double-sparse makes",
        ),
        (None, {"sparsity": None, "pattern": "2:4"}, "makes two factors, and 2:4 is a pattern of one matrix"),
        (None, {"sparsity": 0.99}, "fewer than 64 weights for its square factor"),
        (None, {"case": "gpt_oss"}, "has the matrices of all experts, which cannot become two factors"),
        (None, {"sparsity": None, "pattern": "two-factors:0.4:int8"}, "counts values on the grid int8"),
        (None, {"keep_format": True}, "two factors are in the dtype of the model or on a grid"),
        ("int8", {"quantize": "int4"}, "the values of two factors have 8 bits on a grid, not 4"),
        ("int8", {"quantize": "int4:128"}, "the values of two factors have 8 bits on a grid, not 4"),
        ("int8", {"quantize": "int8:32"}, "groups of a multiple of 64 inputs, not of 32"),
        ("int8", {"sparsity": 0.9}, "fewer than 64 weights for its square factor: the masks take the rest"),
        (
            "int8",
            {"sparsity": None, "pattern": "two-factors:0.4:int8:64"},
            "counts values on the grid int8:64; give that grid too",
        ),
    ],
)
def test_what_two_factors_cannot_have(grid: str | None, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    options = dict(changes)
    model = save_model(tmp_path / "model", options.pop("case", "llama"))
    assert said in message(lambda: run(model, tmp_path / "out", grid, **options), NiwakiError)
    assert not (tmp_path / "out").exists()


def test_small_matrices_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_module, "_LEAST", 64)
    said = message(lambda: run(save_model(tmp_path / "model"), tmp_path / "out"), NiwakiError)
    assert "self_attn.q_proj" in said
    assert "too small for two-factors:0.5: from 64 on" in said


def test_what_would_make_dense_matrices_of_them(tmp_path: Path) -> None:
    model, out, other = save_model(tmp_path / "model"), tmp_path / "out", tmp_path / "x"
    run(model, out, "int8")
    options: dict[str, Any] = {"calibration": niwaki.Calibration(random_tokens(4, 24))}
    stages: list[Any] = [niwaki.Prune("two-factors:0.5"), niwaki.Quantize("int8")]
    for call, expected in (
        (lambda: niwaki.prune(out, other, 0.5, **options), "was pruned to two factors"),
        (lambda: niwaki.shrink(out, other, neurons=0.25, **options), "was pruned to two factors"),
        (
            lambda: niwaki.run(model, other, stages, **options),
            "stage 2, quantize: quantize would make dense matrices of two sparse factors",
        ),
        (
            lambda: niwaki.export(out, other),
            "products of two sparse factors, which compressed-tensors does not have",
        ),
    ):
        assert expected in message(call, UsageError)
        assert not other.exists()


# What else there is


def test_zeros_of_the_model_are_not_kept(tmp_path: Path) -> None:
    """A product has none; the record says so."""
    record = run(sparse_model(tmp_path / "model", sparsity=0.3), tmp_path / "out")
    assert any("weights that were zero in the model no longer are" in note for note in record.notes)


@pytest.mark.parametrize("sparsity", [0.3, 0.7])
def test_what_zeros_cost(sparsity: float, tmp_path: Path) -> None:
    """As many weights in one matrix: square ones, whose second mask takes the most bytes, get fewer zeros for it."""
    matrices = StreamedModel(Checkpoint(save_model(tmp_path / "model", "llama")), "cpu").matrices(0)
    for matrix in matrices:
        chosen = _chosen_at_once(TwoFactors(sparsity), matrix)
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


def test_the_pattern_that_is_recorded_can_be_given(tmp_path: Path) -> None:
    model, pattern = save_model(tmp_path / "model"), "two-factors:0.4:int8"
    run(model, tmp_path / "out", "int8")
    assert run(model, tmp_path / "again", "int8", sparsity=None, pattern=pattern).pattern == pattern
    assert files(tmp_path / "out", "recipe.toml") == files(tmp_path / "again", "recipe.toml")
    assert TwoFactors(0.4, INT8) == niwaki.Prune("two-factors:0.4", quantize="int8").wanted


def test_some_blocks_in_a_run_that_packs(tmp_path: Path) -> None:
    """The others are packed as they are; it is what prune and pack do one after the other."""
    model = save_model(tmp_path / "model", "llama grouped")
    run(model, tmp_path / "pruned", "int8", blocks="1:2")
    niwaki.pack(tmp_path / "pruned", tmp_path / "packed")
    stored = PackedCheckpoint(tmp_path / "packed").index.tensors
    assert {key.split(".")[2] for key, tensor in stored.items() if tensor.inner} == {"1"}
    prune = niwaki.Prune("two-factors:0.4", "double-sparse:rounds=4", quantize="int8", blocks="1:2")
    stages: list[Any] = [prune, niwaki.Pack()]
    options = arguments(calibration=random_tokens(4, 24), text=random_tokens(2, 24, seed=1), device="cpu")
    niwaki.run(model, tmp_path / "run", stages, **options)
    for one, other in zip(*(sorted((tmp_path / name).glob("packed-*")) for name in ("packed", "run")), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_in_half_precision(tmp_path: Path) -> None:
    """Nothing overflows, also where few weights are left."""
    out = tmp_path / "out"
    run(save_model(tmp_path / "model", dtype=torch.float16), out, sparsity=0.7, solver="double-sparse")
    niwaki.pack(out, tmp_path / "packed")
    assert max(float(factor.float().abs().max()) for factor in load_file(out / FACTORS_FILE).values()) < 1e3


def test_products_on_other_processors() -> None:
    """Sums in another order are the same product; another matrix is not."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    W = (left.double() @ right.double()).float()
    assert is_product(W, (left, right))
    assert is_product((left[:, torch.arange(1023, -1, -1)] @ right.flip(0)), (left, right))
    W[3] += 1
    assert not is_product(W, (left, right))
