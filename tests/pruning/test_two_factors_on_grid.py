"""Models whose matrices are products of two sparse factors on a grid of 8 bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NiwakiError, UsageError
from niwaki.evaluation.inspect import opened
from niwaki.layer.grid import Grid
from niwaki.layer.patterns import TwoFactors, factors as pattern_module
from niwaki.models.formats import FACTORS_FILE, Factored, OnGrid, WeightFormat, format_of
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import TrainedFactors, trainable
from niwaki.packed import kernels
from niwaki.packed.format import PackedCheckpoint, PackedTensor
from niwaki.packed.linear import SparseLinear
from niwaki.packed.matrix import pack
from support.arguments import arguments
from support.covering import in_turns, some
from support.decoding import both, packed_model
from support.models import is_pruned, message, random_tokens, reference, save_model
from support.runs import StopAt, files, run as run_small, tensors

INT8 = Grid(8)
#: Of the tensors of one matrix, in the order of its parts.
PARTS = ("left", "right", "left_scale", "right_scale")

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of these tests are smaller than those of models."""
    monkeypatch.setattr(pattern_module, "_LEAST", 4)


def run(model: Path, out: Path, **changes: Any) -> niwaki.Record:
    options = {"solver": "double-sparse:rounds=4", "sparsity": 0.4, "quantize": "int8", **changes}
    return run_small(model, out, **options)


def parts_of(out: Path, key: str) -> list[Tensor]:
    found = load_file(out / FACTORS_FILE)
    return [found[f"{key}_{part}"] for part in PARTS]


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens).logits.float()
    return found


def check_on_grid(factor: Tensor, scales: Tensor) -> None:
    """That all is q s in its dtype, with a whole q of 8 bits, from float64."""
    assert scales.shape == (len(factor), 1)
    assert scales.dtype == factor.dtype
    whole = (factor.double() / scales.double()).round()
    assert -128 <= float(whole.min()) <= float(whole.max()) <= 127
    # A product of numbers in float32 rounded once, as in the dtype itself.
    assert torch.equal((whole.float() * scales.float()).to(factor.dtype), factor)
    assert not ((factor == 0) & factor.float().signbit()).any()


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
@each_dtype
def test_pruned(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The file has products of factors that are on their grids, and as many values as one matrix of 8 bits has room."""
    model, out = save_model(tmp_path / "model", case, dtype=dtype), tmp_path / "out"
    record = run(model, out)
    before, after = tensors(model), tensors(out)
    pruned = {key.rpartition("_left")[0] for key in load_file(out / FACTORS_FILE) if key.endswith("_left")}
    assert pruned
    assert {
        key for key in before if is_pruned(case, key) and before[key].ndim == 2 and key.endswith("weight")
    } == pruned
    kept = size = 0
    for key, W in after.items():
        if key not in pruned:
            assert torch.equal(W, before[key])
            continue
        left, right, *scales = parts_of(out, key)
        for factor, of_rows in zip((left, right), scales, strict=True):
            assert factor.dtype == dtype
            check_on_grid(factor, of_rows)
        of_matrix = W.mT if case == "gpt2" else W
        product = left.double() @ right.double()
        assert torch.allclose(product, of_matrix.double(), rtol=torch.finfo(dtype).eps, atol=1e-6)
        here = int(left.count_nonzero() + right.count_nonzero())
        rows, columns = of_matrix.shape
        inner = min(rows, columns)
        # In bits: 8 for a value, one for each place, 16 for a scale.
        of_one = 8 * (rows * columns - round(0.4 * rows * columns)) + rows * columns + 16 * rows
        beside = rows * inner + inner * columns + 16 * (rows + inner)
        assert 0.95 * (of_one - beside) <= 8 * here <= of_one - beside
        kept, size = kept + here, size + W.numel()
    assert record.sparsity == pytest.approx(1 - kept / size)
    assert (record.pattern, record.quantization) == ("two-factors:0.4:int8", "int8")
    config = json.loads((out / "config.json").read_text())["pruning_config"]
    assert (config["pattern"], config["quantization"]) == ("two-factors:0.4:int8", "int8")
    assert [note for note in record.notes if "products of their two factors" in note]
    assert not [note for note in record.notes if "stored as usual" in note]
    assert "before rounding" in record.rounding
    assert not (out / "quantization").exists()
    tokens = random_tokens(1, 12)
    found, right_logits = logits(niwaki.load(out, "cpu"), tokens), logits(reference(out, dtype), tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (found - right_logits).abs().max() <= tolerance * right_logits.abs().max()


def test_rounding_changes_little(tmp_path: Path) -> None:
    """Of the error, and the record has both."""
    record = run(save_model(tmp_path / "model"), tmp_path / "out")
    for matrix in record.matrices:
        assert matrix.error == pytest.approx(float(matrix.stats["error_before_rounding"]), rel=0.05)
        assert matrix.error != matrix.stats["error_before_rounding"]
        assert int(matrix.stats["rounded_to_zero"]) >= 0


def test_what_is_said_of_it(tmp_path: Path) -> None:
    run(save_model(tmp_path / "model"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| pattern | two-factors:0.4:int8 |" in card
    assert "| grid of the weights | int8: error" in card
    assert opened(tmp_path / "out").checkpoint.pruning.pattern == "two-factors:0.4:int8"
    niwaki.report(tmp_path / "out")
    assert "two-factors:0.4:int8" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(("case", "dtype"), in_turns(["llama", "gpt2"], DTYPES))
def test_fitted(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Both factors change on their masks and grids, with the same scales, and blocks come nearer to the dense ones."""
    model = save_model(tmp_path / "model", case, dtype=dtype)
    run(model, tmp_path / "fast", effort="fast")
    record = run(model, tmp_path / "out", effort="fast:epochs=8")
    assert all(fit.after < 0.98 * fit.before for fit in record.fits)
    fast, fitted = load_file(tmp_path / "fast" / FACTORS_FILE), load_file(tmp_path / "out" / FACTORS_FILE)
    for key in (key for key in fast if ".0." in key):  # later blocks see other inputs
        assert torch.equal(fast[key] != 0, fitted[key] != 0)
        assert torch.equal(fast[key], fitted[key]) == key.endswith("scale")
    found = tensors(tmp_path / "out")
    for key in {key.rpartition("_left")[0] for key in fitted if key.endswith("_left")}:
        left, right, *scales = parts_of(tmp_path / "out", key)
        check_on_grid(left, scales[0])
        check_on_grid(right, scales[1])
        W = found[key].mT if case == "gpt2" else found[key]
        assert torch.allclose(W.float(), left.float() @ right.float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    niwaki.pack(tmp_path / "out", tmp_path / "packed")


def test_gradients_are_those_of_rounded_factors(tmp_path: Path) -> None:
    """Against torch's own, through products of the factors that the block computes with; settled, it keeps these."""
    model = StreamedModel(Checkpoint(save_model(tmp_path / "model")), "cpu", "float32")
    stream, generator = model.stream(), torch.Generator().manual_seed(1)
    block, states = next(stream), model.embed(random_tokens(2, 12))

    def loss() -> Tensor:
        return block.run(states.hidden[0], states, 0).square().sum()

    parts, rounded = {}, {}
    for matrix in block.matrices:
        inner = min(matrix.shape)
        factors = [
            0.3 * torch.randn(shape, generator=generator)
            for shape in ((matrix.shape[0], inner), (inner, matrix.shape[1]))
        ]
        factors[0][:, 3] = 0
        factors[1][2, 2] = 1e-6  # which is not to become 0
        scales = [torch.full((len(factor), 1), 0.02) for factor in factors]
        parts[matrix.name] = [*factors, *scales]
        codes = [(factor / 0.02).round().clamp(-128, 127) for factor in factors]
        codes = [torch.where(code == 0, factor.sign(), code) for code, factor in zip(codes, factors, strict=True)]
        rounded[matrix.name] = [0.02 * code for code in codes]
        assert rounded[matrix.name][1][2, 2] == 0.02
    with trainable(block):
        trained = TrainedFactors(block, parts, Factored(INT8).project_factors)
        with trained.computing(), torch.enable_grad():
            loss().backward()
        found = trained.gradients()
        trained.settle()
        settled = trained.parts
    leaves = [each.clone().requires_grad_() for pair in rounded.values() for each in pair]
    with torch.enable_grad():
        for matrix, left, right in zip(block.matrices, leaves[::2], leaves[1::2], strict=True):
            layer = block.module.get_submodule(matrix.name)
            assert torch.allclose(block.module.get_parameter(matrix.parameter), left @ right, atol=1e-5)
            del layer._parameters["weight"]
            layer.weight = left @ right
        expected = torch.autograd.grad(loss(), leaves)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    for name, pair in rounded.items():
        for kept, wanted in zip(settled[name], [*pair, *parts[name][2:]], strict=True):
            assert torch.allclose(kept, wanted, rtol=1e-6, atol=0)
    stream.close()


@pytest.mark.parametrize(("matrices", "effort"), in_turns([3, 10], ["fast", "balanced"]))
def test_stopped(matrices: int, effort: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", shards=True)
    run(model, tmp_path / "whole", effort=effort)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", effort=effort, progress=StopAt(matrices))
    record = run(model, tmp_path / "out", effort=effort)
    assert bool(record.resumed) == (matrices == 10)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("part", some(PARTS, 2))
def test_a_part_that_was_damaged_is_made_again(part: str, tmp_path: Path) -> None:
    """Of a run that was stopped: each part of a matrix counts."""
    model = save_model(tmp_path / "model")
    run(model, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", progress=StopAt(10))
    (file,) = tmp_path.glob(f".*/**/{FACTORS_FILE}")
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    key = next(key for key in header if ".0." in key and key.endswith(part))
    data[8 + size + header[key]["data_offsets"][0]] ^= 1
    file.write_bytes(data)
    run(model, tmp_path / "out")
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
    run(model, out)
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
    for changes, expected in (
        ({}, Factored(INT8)),
        ({"quantize": None}, Factored()),
        ({"solver": "magnitude"}, OnGrid(INT8)),
    ):
        out = tmp_path / str(expected)
        run(model, out, **changes)
        assert format_of(Checkpoint(out)) == expected


@pytest.mark.parametrize(("case", "dtype"), in_turns(["llama", "gpt2"], DTYPES))
def test_packed(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Masks, whole numbers and scales of both factors, which give them back to the bit."""
    model, out, packed = save_model(tmp_path / "model", case, dtype=dtype), tmp_path / "out", tmp_path / "packed"
    run(model, out)
    niwaki.pack(out, packed)
    checkpoint = PackedCheckpoint(packed)
    stored = {key: tensor for key, tensor in checkpoint.index.tensors.items() if tensor.packed}
    assert {key for key in tensors(model) if is_pruned(case, key) and key.endswith("weight")} == stored.keys()
    written = load_file(next(packed.glob("packed-*.safetensors")))
    for key, tensor in stored.items():
        assert (tensor.bits, tensor.groups, tensor.groups_right) == (8, 1, 1)
        parts = parts_of(out, key)
        for side, matrix, factor, scales in zip(
            ("left", "right"), checkpoint.packed(key), parts[:2], parts[2:], strict=True
        ):
            assert written[f"{key}.{side}.values"].dtype == torch.int8
            assert torch.equal(written[f"{key}.{side}.scales"], scales)
            assert torch.equal(kernels.expand(matrix), factor)
    loaded, tokens = niwaki.load(packed, "cpu"), random_tokens(2, 12)
    layers = [layer for layer in loaded.modules() if isinstance(layer, SparseLinear)]
    assert len(layers) == len(stored)
    assert all(layer.is_product and layer.values.dtype == torch.int8 for layer in layers)
    right = logits(reference(out, dtype), tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (logits(loaded, tokens) - right).abs().max() <= tolerance * right.abs().max()
    niwaki.unpack(packed, tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "config.json").read_bytes() == (out / "config.json").read_bytes()
    before, after = (load_file(path / FACTORS_FILE) for path in (out, tmp_path / "unpacked"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    niwaki.pack(tmp_path / "unpacked", tmp_path / "again")
    assert load_file(next((tmp_path / "again").glob("packed-*.safetensors"))).keys() == written.keys()


def test_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale for each 64 inputs of both factors, in a model with matrices that have them; and others are refused."""
    monkeypatch.setattr(pattern_module, "_LEAST", 64)
    model = packed_sizes(tmp_path / "model")
    out, packed = tmp_path / "out", tmp_path / "packed"
    run(model, out, quantize="int8:64")
    niwaki.pack(out, packed)
    checkpoint = PackedCheckpoint(packed)
    shapes = set()
    for key, tensor in checkpoint.index.tensors.items():
        if not tensor.packed:
            continue
        rows, columns = tensor.shape
        inner = min(rows, columns)
        assert (tensor.groups, tensor.groups_right) == (inner // 64, columns // 64)
        shapes.add((tensor.groups, tensor.groups_right))
        for matrix, factor in zip(checkpoint.packed(key), parts_of(out, key), strict=False):
            assert torch.equal(kernels.expand(matrix), factor)
    assert len(shapes) > 1
    niwaki.unpack(packed, tmp_path / "unpacked")
    before, after = (load_file(path / FACTORS_FILE) for path in (out, tmp_path / "unpacked"))
    assert all(torch.equal(before[key], after[key]) for key in before)
    said = message(lambda: run(model, tmp_path / "x", quantize="int8:128"), UsageError)
    assert "64 inputs cannot be divided into groups of 128" in said


def packed_sizes(path: Path) -> Path:
    """A model with matrices of 64 x 128, 128 x 64, 64 x 64 and 128 x 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.skipif(kernels.library() is None, reason="no native library")
@each_dtype
def test_single_tokens_are_computed_natively(dtype: torch.dtype, tmp_path: Path) -> None:
    run(save_model(tmp_path / "model", "llama grouped", dtype=dtype), tmp_path / "out")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    model, tokens = niwaki.load(tmp_path / "packed", "cpu"), random_tokens(1, 12)
    found, right, steps = both(model, tokens, given=5)
    assert steps == 7 * model.config.num_hidden_layers
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (found - right).abs().max() <= tolerance * right.abs().max()


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
            for count in (1, 3, 40):  # by kernels, and by torch
                x = torch.randn(count, layer.in_features, generator=generator)
                y = (x.double() @ (dense[0] @ dense[1]).T).float()
                assert torch.allclose(factored(x) - (0 if layer.bias is None else layer.bias), y, atol=1e-4)
    found, right_logits, steps = both(model, random_tokens(1, 12), given=5)
    assert steps == 7 * model.config.num_hidden_layers
    assert (found - right_logits).abs().max() <= 1e-5 * right_logits.abs().max()


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
    values: dict[str, Any] = {
        "file": "packed.safetensors",
        "dtype": "BF16",
        "shape": (128, 256),
        "packed": True,
        "transposed": False,
        "count": 7,
        "bits": 8,
        "groups": 1,
        "sha256": "",
        "inner": 128,
        "count_right": 9,
        "groups_right": 1,
    }
    PackedTensor(**values).check()
    with pytest.raises(ValueError, match=said):
        PackedTensor(**{**values, **changes}).check()


@pytest.mark.parametrize("part", ["left", "right", "right_scale"])
def test_factors_that_have_left_their_grid(part: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(save_model(tmp_path / "model"), out)
    found = load_file(out / FACTORS_FILE)
    key = next(key for key in found if key.endswith(f"_{part}"))
    # Little enough for their product to be the same but for rounding.
    found[key][found[key] != 0] *= 1 + 2.0**-23 if part != "right_scale" else 1.01
    save_file(found, out / FACTORS_FILE, {"format": "pt"})
    said = message(lambda: niwaki.pack(out, tmp_path / "packed"), CheckpointError)
    assert "has factors that are not on int8; prune it again" in said
    assert not (tmp_path / "packed").exists()


def test_scales_that_are_gone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(save_model(tmp_path / "model"), out)
    found = load_file(out / FACTORS_FILE)
    del found[next(key for key in found if key.endswith("_scale"))]
    save_file(found, out / FACTORS_FILE, {"format": "pt"})
    said = message(lambda: niwaki.pack(out, tmp_path / "packed"), CheckpointError)
    assert f"{out / FACTORS_FILE} has no factors of" in said


def test_exports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(save_model(tmp_path / "model"), out)
    said = message(lambda: niwaki.export(out, tmp_path / "x"), UsageError)
    assert "products of two sparse factors, which compressed-tensors does not have" in said
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantize": "int4"}, "the values of two factors have 8 bits on a grid, not 4"),
        ({"quantize": "int4:128"}, "the values of two factors have 8 bits on a grid, not 4"),
        ({"quantize": "int8:32"}, "groups of a multiple of 64 inputs, not of 32"),
        ({"sparsity": 0.9}, "fewer than 64 weights for its square factor: the masks take the rest"),
        (
            {"sparsity": None, "pattern": "two-factors:0.4:int8:64"},
            "counts values on the grid int8:64; give that grid too",
        ),
        ({"sparsity": None, "pattern": "two-factors:0.4:int8", "quantize": None}, "counts values on the grid int8"),
        ({"keep_format": True, "quantize": None}, "two factors are in the dtype of the model or on a grid"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    assert said in message(lambda: run(model, tmp_path / "out", **changes), NiwakiError)
    assert not (tmp_path / "out").exists()


def test_the_pattern_that_is_recorded_can_be_given(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run(model, tmp_path / "out")
    record = run(model, tmp_path / "again", sparsity=None, pattern="two-factors:0.4:int8")
    assert record.pattern == "two-factors:0.4:int8"
    assert files(tmp_path / "out", "recipe.toml") == files(tmp_path / "again", "recipe.toml")
    assert TwoFactors(0.4, INT8) == niwaki.Prune("two-factors:0.4", quantize="int8").wanted


def test_some_blocks_in_a_run_that_packs(tmp_path: Path) -> None:
    """The others are packed as they are; it is what prune and pack do one after the other."""
    model = save_model(tmp_path / "model", "llama grouped")
    run(model, tmp_path / "pruned", blocks="1:2")
    niwaki.pack(tmp_path / "pruned", tmp_path / "packed")
    stored = PackedCheckpoint(tmp_path / "packed").index.tensors
    assert {key.split(".")[2] for key, tensor in stored.items() if tensor.inner} == {"1"}
    prune = niwaki.Prune("two-factors:0.4", "double-sparse:rounds=4", quantize="int8", blocks="1:2")
    stages: list[Any] = [prune, niwaki.Pack()]
    options = arguments(calibration=random_tokens(4, 24), text=random_tokens(2, 24, seed=1), device="cpu")
    niwaki.run(model, tmp_path / "run", stages, **options)
    for one, other in zip(*(sorted((tmp_path / name).glob("packed-*")) for name in ("packed", "run")), strict=True):
        assert one.read_bytes() == other.read_bytes()
