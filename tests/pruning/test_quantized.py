"""Whole runs whose weights end on a grid: what is written, and who can read it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

import niwaki
from niwaki import Calibration
from niwaki.checkpoints.reading import Checkpoint
from niwaki.cli.tables import summary
from niwaki.errors import CheckpointError, NiwakiError, OutputError, UnsupportedModelError
from niwaki.exports.compressed_tensors import packed_integers
from niwaki.exports.export import export
from niwaki.layer.grid import Grid
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import InputGram
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.scales import FILE, verify_grid
from niwaki.models.streamed import StreamedModel
from niwaki.records.record import Record
from support.covering import in_turns
from support.made import made_once
from support.models import a_third_of_the_families, edit_json, is_pruned, message, random_tokens, reference, save_model
from support.problems import geometric_mean
from support.runs import StopAt, files, raw, run as run_small, stopped, tensors, zeros

TOKENS = random_tokens(24, 24)
MIXTURES = ("mixtral", "deepseek_v3")
BEST = "best:synthetic=0:epochs=2:batch=48:rate=0.007:healing=0"


def run(model: Path, out: Path, **changes: Any) -> Record:
    return run_small(model, out, **{"quantize": "int4", "calibration": TOKENS, **changes})


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """``out``, on the grid int4, beside the model that it was made from."""

    def make(place: Path) -> None:
        run(save_model(place / "model"), place / "out", measure="none")

    return made_once(tmp_path, "on int4", make) / "out"


def codes(W: Tensor, scales: Tensor) -> Tensor:
    """(out, in) whole numbers in float64, of which ``W`` in the layout (out, in) is the product with its scales."""
    full = scales.repeat_interleave(W.shape[-1] // scales.shape[-1], dim=-1)
    q = (W.double() / full.double()).round()
    assert raw(q.to(full.dtype) * full) == raw(W.to(full.dtype))
    return q


def check(model: Path, out: Path, grid: Grid, case: str = "llama", even: bool = True) -> None:
    """What was pruned is on the grid, and half zeros, each matrix or all together; all else is as before."""
    before, after, scales = tensors(model), tensors(out), load_file(out / FILE)
    assert before.keys() == after.keys()
    pruned = {key for key in before if is_pruned(case, key)}
    assert scales.keys() == {f"{key}_scale" for key in pruned}
    for key in before:
        W = after[key]
        if key not in pruned:
            assert raw(W) == raw(before[key]), key
            continue
        of_it = scales[f"{key}_scale"]
        if case.startswith("gpt2") or W.ndim == 3:
            W = W.transpose(-1, -2)
        assert of_it.dtype == W.dtype
        assert (of_it != 0).all()
        assert of_it.shape == (*W.shape[:-1], grid.groups(W.shape[-1]))
        q = codes(W, of_it)
        assert q.min() >= -(2 ** (grid.bits - 1))
        assert q.max() < 2 ** (grid.bits - 1)
        assert len(q.unique()) > 5
        assert not (W.float().signbit() & (W == 0)).any()
        for matrix in W if even and W.ndim == 3 else [W] if even else []:
            assert zeros(matrix) >= matrix.numel() // 2, key
    assert sum(zeros(after[key]) for key in pruned) >= sum(after[key].numel() for key in pruned) // 2


@a_third_of_the_families(1)
@pytest.mark.slow
def test_every_family(tmp_path: Path, case: str) -> None:
    model = save_model(tmp_path / "model", case)
    record = run(model, tmp_path / "out", measure="none")
    check(model, tmp_path / "out", Grid(4), case)
    assert record.quantization == "int4"
    assert record.sparsity >= 0.5
    for matrix in record.matrices:
        assert matrix.sparsity >= 0.5
        assert float(matrix.stats["error_before_rounding"]) > 0
        lost = int(matrix.stats["rounded_to_zero"])
        assert lost == round(matrix.sparsity * math.prod(matrix.shape)) - math.prod(matrix.shape) // 2
    reference(tmp_path / "out")  # transformers does not mind


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("quantize", ["int8", "int4:8", "int3:16"])
@pytest.mark.slow
def test_every_dtype(tmp_path: Path, dtype: str, quantize: str) -> None:
    """What is stored is the product of code and scale in the dtype of the scales, to the bit."""
    model = save_model(tmp_path / "model", dtype=getattr(torch, dtype))
    run(model, tmp_path / "out", quantize=quantize, measure="none", blocks=(1, 2))
    after, scales = tensors(tmp_path / "out"), load_file(tmp_path / "out" / FILE)
    assert len(scales) == 7
    for key, of_it in scales.items():
        assert str(of_it.dtype) == f"torch.{'float32' if dtype == 'float64' else dtype}"
        W = after[key.removesuffix("_scale")]
        assert str(W.dtype) == f"torch.{dtype}"
        codes(W, of_it)
        assert ".layers.1." in key


@pytest.mark.slow
def test_weights_are_fitted_to_their_grid(tmp_path: Path) -> None:
    """Not only rounded: at 8 bits the output error of Wanda's mask is below that of weights left as they were."""
    model = save_model(tmp_path / "model")
    plain = run(model, tmp_path / "plain", quantize=None, measure="none", blocks=(0, 1))
    fine, coarse = (
        run(model, tmp_path / grid, quantize=grid, measure="none", blocks=(0, 1)) for grid in ("int8", "int3")
    )
    for before, after, third in zip(plain.matrices, fine.matrices, coarse.matrices, strict=True):
        assert after.stats["error_before_rounding"] == third.stats["error_before_rounding"] == before.error
        assert "error_before_rounding" not in before.stats
        assert after.error < before.error
        assert after.error < third.error


@pytest.mark.slow
def test_nothing_is_pruned_at_sparsity_0(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    record = run(model, tmp_path / "out", solver="continuation", sparsity=0, quantize="int8", measure="none")
    assert 0 < record.sparsity < 0.02
    assert record.mean_error < 1e-3


@pytest.mark.parametrize("effort", ["balanced", BEST])
@pytest.mark.slow
def test_efforts_keep_to_the_grid(tmp_path: Path, effort: str) -> None:
    model = save_model(tmp_path / "model", "llama grouped")
    record = run(model, tmp_path / "out", effort=effort, quantize="int4:16")
    check(model, tmp_path / "out", Grid(4, 16), even=False)
    assert effort == "balanced" or any(fit.after < fit.before for fit in record.fits)
    written = tensors(tmp_path / "out")
    for matrix in record.matrices:
        stored = written[f"model.layers.{matrix.block}.{matrix.name}.weight"]
        assert matrix.sparsity == zeros(stored) / stored.numel()


@pytest.mark.slow
def test_importance_of_rows_leaves_no_trace_on_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows do not compete, weights and scales are those without importance."""
    monkeypatch.setattr("niwaki.layer.rounding.has_bfloat16_units", lambda: False)  # which would end elsewhere
    model = save_model(tmp_path / "model", dtype=torch.bfloat16)
    changes = {"sparsity": None, "pattern": "per-row:0.5", "quantize": "int4:16", "blocks": (0, 1)}
    one = run(model, tmp_path / "one", **changes)
    other = run(model, tmp_path / "other", effort="fast:importance=1", **changes)
    for a, b in zip(one.matrices, other.matrices, strict=True):
        assert a.error == pytest.approx(b.error, rel=1e-3)
    for file in ("model.safetensors", FILE):
        first, second = load_file(tmp_path / "one" / file), load_file(tmp_path / "other" / file)
        for key, value in first.items():
            assert (value == second[key]).double().mean() > 0.98, key


@pytest.mark.parametrize(("case", "dtype"), in_turns(["gpt_oss", "mixtral", "gpt2"], ["float32", "bfloat16"]))
@pytest.mark.slow
def test_fitted_blocks_of_other_layouts(tmp_path: Path, case: str, dtype: str) -> None:
    model = save_model(tmp_path / "model", case, dtype=getattr(torch, dtype))
    record = run(model, tmp_path / "out", effort="fast:epochs=2:batch=48:rate=0.01", quantize="int8")
    check(model, tmp_path / "out", Grid(8), case)
    assert any(fit.after < fit.before for fit in record.fits)


def test_the_perplexity_is_that_of_what_is_written(tmp_path: Path) -> None:
    model, text = save_model(tmp_path / "model"), random_tokens(6, 24, seed=5)
    record = run(model, tmp_path / "out", text=text)
    whole: Any = reference(tmp_path / "out")
    loss = float(whole(text, labels=text).loss)
    assert record.perplexity["after"].value == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama grouped", shards=True)
    changes = {"quantize": "int4:16", "effort": BEST, "calibration": TOKENS}
    run(model, tmp_path / "whole", **changes)
    stopped(model, tmp_path / "out", 10, **changes)
    for other, name in (("int4:8", "int4:8"), (None, "none")):
        said = message(lambda other=other: run(model, tmp_path / "out", **{**changes, "quantize": other}))  # type: ignore[misc]
        assert f"quantize (int4:16 there, {name} here)" in said
    assert run(model, tmp_path / "out", **changes).resumed == [1]
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert FILE in files(tmp_path / "out")


@pytest.mark.slow
def test_rows_are_rounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the loss loses; resumed to the same bytes; alone where there are no gradients, and where zeros are."""
    monkeypatch.setattr("niwaki.layer.rounding._ROWS", 4)
    model = save_model(tmp_path / "model", dtype=torch.bfloat16)
    given: dict[str, Any] = {"calibration": Calibration(TOKENS), "compute": "cpu", "measurement": None}

    def made(out: str, effort: str = "fast:together=16", **more: Any) -> dict[str, Tensor]:
        niwaki.quantize(model, tmp_path / out, "int3:16", effort=effort, **given, **more)
        verify_grid(tmp_path / out, StreamedModel(Checkpoint(model), "cpu").matrices(), Grid(3, 16))
        return load_file(tmp_path / out / "model.safetensors")

    together, alone = made("together"), made("alone", "fast")
    changed = [key for key in alone if not torch.equal(together[key], alone[key])]
    assert changed == [key for key in alone if is_pruned("llama", key)]
    with pytest.raises(KeyboardInterrupt):
        made("again", progress=StopAt(8))
    made("again")
    assert files(tmp_path / "again", "recipe.toml") == files(tmp_path / "together", "recipe.toml")

    def none(*_: object, **__: object) -> None:
        raise UnsupportedModelError("a.weight is not used")

    monkeypatch.setattr("niwaki.pruning.plan.measured_couplings", none)
    assert all(torch.equal(value, alone[key]) for key, value in made("none").items())
    notes = Record.load(tmp_path / "none" / "niwaki.json").notes
    assert "each row of a matrix is rounded alone: a.weight is not used" in notes
    pruned = run(model, tmp_path / "pruned", quantize="int3:16", effort="fast:together=16")
    assert pruned.effort["together"] == 0
    for grid, expected in (("int5.5:16", 16), ("int6:16", 0)):
        found = niwaki.quantize(model, tmp_path / grid, grid, effort="fast:together=16", **given)
        assert found.effort["together"] == expected


def test_each_token_counts_as_it_was_seen_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a fit mixes the windows, and of the text that the model wrote."""
    model, seen = save_model(tmp_path / "model"), dict[tuple[object, ...], Tensor]()
    usual = DecoderBlock.input_grams

    def watched(self: DecoderBlock, states: HiddenStates, *given: Any, **named: Any) -> list[InputGram]:
        for name, tokens in named.get("weights", {}).items():
            for window, row in zip(torch.cat(states.tokens), tokens, strict=True):
                place = (self.index, name, *window.tolist())
                torch.testing.assert_close(row, seen.setdefault(place, row))
        return usual(self, states, *given, **named)

    monkeypatch.setattr(DecoderBlock, "input_grams", watched)
    for epochs, out in ((1, "all"), (0.5, "mixed")):
        effort = f"fast:together=16:synthetic=0.5:epochs={epochs}"
        given: dict[str, Any] = {"calibration": Calibration(TOKENS), "compute": "cpu", "measurement": None}
        niwaki.quantize(model, tmp_path / out, "int3:16", effort=effort, **given)
    assert len(seen) == len(TOKENS) * 3 // 2 * len(StreamedModel(Checkpoint(model), "cpu").matrices())
    assert not torch.equal(*[*seen.values()][:2])


@pytest.mark.slow
def test_with_little_memory(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    for memory in (None, 1):
        run(model, tmp_path / f"{memory}", effort=BEST, max_memory=memory)
    assert tensors(tmp_path / "None").keys() == tensors(tmp_path / "1").keys()
    for path in ("model.safetensors", FILE):
        assert (tmp_path / "None" / path).read_bytes() == (tmp_path / "1" / path).read_bytes()


@pytest.mark.slow
def test_what_was_on_a_grid_can_be_pruned_again(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run(model, tmp_path / "first")
    record = run(tmp_path / "first", tmp_path / "second", sparsity=0.7, quantize="int3")
    check(tmp_path / "first", tmp_path / "second", Grid(3))
    assert any(FILE in note for note in record.notes)
    run(tmp_path / "first", tmp_path / "third", quantize=None)
    assert not (tmp_path / "third" / FILE).exists()
    assert "quantization" not in json.loads((tmp_path / "third" / "config.json").read_text())["pruning_config"]


@pytest.mark.parametrize(
    ("quantize", "said"),
    [
        ("int4:32", "48 inputs cannot be divided into groups of 32 that share a scale; try int4:16, or int4 for one"),
        ("int9", "a grid has 2 to 8 bits; got 9"),
        ("q4", "'q4' is not a valid grid; try int4:128, int8, or int5.5:64 for mixed bits"),
    ],
)  # fmt: skip
def test_grids_that_cannot_be(tmp_path: Path, quantize: str, said: str) -> None:
    model = save_model(tmp_path / "model")
    assert message(lambda: run(model, tmp_path / "out", quantize=quantize)).startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_told(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    record = run(model, tmp_path / "out", quantize="int4:16")
    assert Record.from_json((tmp_path / "out" / "niwaki.json").read_text()) == record
    before = geometric_mean([float(matrix.stats["error_before_rounding"]) for matrix in record.matrices])
    after = geometric_mean([matrix.error for matrix in record.matrices])
    said = f"int4:16: error {before:#.2g} before rounding, {after:#.2g} after; "
    assert record.rounding.startswith(said)
    sizes = [math.prod(matrix.shape) for matrix in record.matrices]
    zero = sum(int(matrix.stats["rounded_to_zero"]) for matrix in record.matrices)
    assert record.rounding.endswith(f"; {200 * zero / sum(sizes):.2g} % of the remaining weights became 0")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| grid of the weights | {record.rounding} |" in card
    assert "* weights on the grid int4:16 are stored as usual until they are packed, so that they load wherever" in card
    console = Console(width=200)
    with console.capture() as shown:
        console.print(summary(record))
    assert said in shown.get()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pruning_config"]["quantization"] == "int4:16"
    assert "quantization_config" not in config
    old = dataclasses.asdict(record)
    del old["quantization"]
    assert Record.from_json(json.dumps(old)).quantization is None


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weight", "'{}' has weights on disk that are not on its grid int4"),
        ("scale", "'{}' has weights on disk that are not on its grid int4"),
        ("no scale", "'{}_scale' has scales that are 0 or not finite"),  # a row of zeros may well be on the grid
    ],
)
@pytest.mark.slow
def test_weights_off_the_grid_are_found(tmp_path: Path, quantized: Path, what: str, said: str) -> None:
    """What is on the disk is compared, to the bit."""
    matrices = StreamedModel(Checkpoint(tmp_path / "model"), "cpu").matrices()
    verify_grid(quantized, matrices, Grid(4))
    key, path = "model.layers.1.mlp.up_proj.weight", quantized / ("model.safetensors" if what == "weight" else FILE)
    data, value = bytearray(path.read_bytes()), load_file(path)[key if what == "weight" else f"{key}_scale"]
    at = data.index(raw(value))
    first = tuple((value != 0).nonzero()[0].tolist())
    value[first] = 0.0 if what == "no scale" else torch.nextafter(value[first], torch.tensor(9.0))
    data[at : at + value.nbytes] = raw(value)
    path.write_bytes(data)
    found = message(lambda: verify_grid(quantized, matrices, Grid(4)), NiwakiError)
    assert said.format(key) in found
    assert message(lambda: export(quantized, tmp_path / "packed"), NiwakiError) == found


# Packed


def unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Bit for bit, by the definition of the format."""
    rows = []
    for words in packed.tolist():
        stream = "".join(f"{word % 2**32:032b}"[::-1] for word in words)
        cut = [stream[i * bits : (i + 1) * bits][::-1] for i in range(columns)]
        rows.append([int(piece, 2) - 2 ** (bits - 1) for piece in cut])
    return torch.tensor(rows)


def test_a_pruned_model_keeps_its_pattern_on_a_grid(tmp_path: Path) -> None:
    """Also where nothing but rounding is done, and no other line says what made the zeros."""
    niwaki.prune(
        save_model(tmp_path / "model"), tmp_path / "out", "2:4", effort="fast", calibration=TOKENS, measurement=None
    )
    record = niwaki.quantize(tmp_path / "out", tmp_path / "again", "int8", measurement=None)
    claims = json.loads((tmp_path / "again" / "config.json").read_text())["pruning_config"]
    assert (record.pattern, claims["pattern"], claims["sparsity"]) == ("2:4", "2:4", 0.5)
    assert "| pattern | 2:4 |" in (tmp_path / "again" / "README.md").read_text()
    assert not any("--revive" in note for note in record.notes)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [8, 32, 21, 77])
def test_packing(bits: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (50, columns), generator=generator)
    packed = packed_integers(q.float(), bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (50, -(-columns * bits // 32))
    assert torch.equal(unpacked(packed, bits, columns), q)
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(packed, helpers.pack_to_int32(q.to(torch.int8), bits))


@pytest.mark.parametrize(("quantize", "shards"), [("int4:16", False), ("int8", True)])
@pytest.mark.slow
def test_a_packed_model(tmp_path: Path, quantize: str, shards: bool) -> None:
    model = save_model(tmp_path / "model", dtype=torch.bfloat16, shards=shards)
    (model / "notes.txt").write_text("notes")
    run(model, tmp_path / "out", quantize=quantize, blocks=(1, 2))
    said = export(tmp_path / "out", tmp_path / "packed")
    signs = {bool((each < 0).any()) for each in load_file(tmp_path / "out" / FILE).values()}
    assert [note.split(",")[0] for note in said] == ["some scales are below 0"] * (True in signs)
    before, after = tensors(tmp_path / "out"), tensors(tmp_path / "packed")
    scales = load_file(tmp_path / "out" / FILE)
    packed = {key.removesuffix("_scale") for key in scales}
    bits = int(quantize[3])
    for key, value in before.items():
        if key not in packed:
            assert raw(after.pop(key)) == raw(value)
            continue
        assert after.pop(f"{key}_shape").tolist() == list(value.shape)
        of_it = after.pop(f"{key}_scale")
        assert raw(of_it) == raw(scales[f"{key}_scale"])
        q = unpacked(after.pop(f"{key}_packed"), bits, value.shape[1])
        assert torch.equal(q, codes(value, of_it).long())
    assert not after
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    quantized = config.pop("quantization_config")
    assert config == json.loads((tmp_path / "out" / "config.json").read_text())
    group = quantized["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    wanted = {"num_bits": bits, "strategy": "group" if ":" in quantize else "channel"}
    assert wanted.items() <= group["weights"].items()
    assert group["weights"]["group_size"] == (16 if ":" in quantize else None)
    assert len(quantized["ignore"]) == 9
    assert "lm_head" in quantized["ignore"]
    if shards:
        index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
        for key, shard in index["weight_map"].items():
            assert key in load_file(tmp_path / "packed" / shard)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors(tmp_path / "packed").values())
    assert (tmp_path / "packed" / "notes.txt").read_text() == "notes"
    for name, what in (("README.md", "\n    vllm serve DIR\n"), ("niwaki.json", "weights are packed in the format")):
        assert "stored as usual" in (tmp_path / "out" / name).read_text()
        assert what in (text := (tmp_path / "packed" / name).read_text())
        assert "stored as usual" not in text
        assert "loads wherever" not in text
    notes = Record.from_json((tmp_path / "packed" / "niwaki.json").read_text()).notes
    assert len(notes) == len(Record.from_json((tmp_path / "out" / "niwaki.json").read_text()).notes)
    assert not (tmp_path / "packed" / FILE).exists()


@pytest.mark.parametrize(
    ("case", "quantize"),
    [
        *(("llama biases", grid) for grid in ("int4:16", "int4", "int8")),
        ("llama tied", "int4"),
        ("qwen3", "int4:16"),
        ("gemma3", "int8"),  # which the files call otherwise than transformers does
        *((case, "int4") for case in ("mixtral", "qwen2_moe dense", "deepseek_v3")),
        *(("llama", grid) for grid in ("int2", "int3:16", "int5", "int6:16", "int3.6")),
        *((case, "int4.5") for case in ("gemma3", "mixtral", "deepseek_v3")),
    ],
)
@torch.no_grad()
@pytest.mark.slow
def test_transformers_computes_the_same_with_packed_weights(tmp_path: Path, case: str, quantize: str) -> None:
    pytest.importorskip("compressed_tensors")
    model = save_model(tmp_path / "model", case, dtype=torch.bfloat16)
    record = run(model, tmp_path / "out", quantize=quantize, measure="none")
    assert any("'niwaki export'" in note for note in record.notes)
    said = export(tmp_path / "out", tmp_path / "packed")
    assert any("transformers unpacks experts" in note for note in said) == ("moe" in case or case in MIXTURES)
    # vLLM has a linear layer for a router, and must not look for packed integers there.
    ignored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["ignore"]
    routers = [key for key in tensors(tmp_path / "out") if key.endswith(".gate.weight")]
    assert all(key.removesuffix(".weight") in ignored for key in routers)
    dense, packed = (reference(tmp_path / name, torch.bfloat16) for name in ("out", "packed"))
    assert torch.equal(dense(TOKENS).logits, packed(TOKENS).logits)


@pytest.mark.parametrize(
    ("case", "quantize", "said"),
    [
        ("llama", None, "has no weights on a grid, which compressed-tensors needs: quantize it first"),
        ("gpt2", "int4", "none: it is stored the other way around, as (inputs, outputs); 'niwaki pack' writes it"),
        ("gpt_oss", "int4", "none: it is one tensor with the matrices of all experts; 'niwaki pack' writes it"),
        ("zamba", "int4", "is none: several blocks share it"),
        ("falcon", "int4", "transformers cannot load packed integers into FalconForCausalLM"),
        ("mixtral", "int4 0:1", "has experts in its blocks (0, 1) on a grid and others that are not"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_packed(tmp_path: Path, case: str, quantize: str | None, said: str) -> None:
    model = save_model(tmp_path / "model", case)
    grid, _, blocks = (quantize or "").partition(" ")
    record = run(model, tmp_path / "out", quantize=grid or None, measure="none", blocks=blocks or None)
    if case in ("gpt2", "gpt_oss", "zamba"):
        assert not any("'niwaki export'" in note for note in record.notes)
    kind = UnsupportedModelError if case != "llama" else Exception
    with pytest.raises(kind) as caught:
        export(tmp_path / "out", tmp_path / "packed")
    assert said in str(caught.value)
    assert not (tmp_path / "packed").exists()


FUSED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}


@pytest.mark.slow
def test_layers_that_servers_fuse_have_the_same_bits(tmp_path: Path) -> None:
    """Those of a run that ends with an export are chosen so; of others the fewer bits are stored as the more."""
    model = save_model(tmp_path / "model", "llama", dtype=torch.bfloat16)
    stages = ["quantize int4.2", "export compressed-tensors"]
    both = niwaki.run(model, tmp_path / "both", stages, calibration=Calibration(TOKENS))
    run(model, tmp_path / "out", quantize="int4.2")
    said = export(tmp_path / "out", tmp_path / "packed")
    assert not any("take the space of more" in note for note in both.notes)
    assert any("take the space of more" in note for note in said)
    for name in ("both", "packed"):
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        *named, (usual, default) = [
            (each["weights"]["num_bits"], each["targets"]) for each in config["config_groups"].values()
        ]
        assert default == ["Linear"]
        bits = {target: each for each, targets in named for target in targets}
        assert {usual, *bits.values()} <= {2, 3, 4, 5, 6, 8}
        assert len({usual, *bits.values()}) > 1
        stored = tensors(tmp_path / name)
        for block, (place, names) in itertools.product(range(2), FUSED.items()):
            layers = [f"model.layers.{block}.{place}.{each}" for each in names]
            assert len({bits.get(layer, usual) for layer in layers}) == 1
            for layer in layers:
                width = int(stored[f"{layer}.weight_shape"][1])
                assert stored[f"{layer}.weight_packed"].shape[1] == -(-width * bits.get(layer, usual) // 32)


def test_other_files_of_an_export(tmp_path: Path, quantized: Path) -> None:
    """What somebody wrote on the card stays, and all files have the usual mode."""
    card = quantized / "README.md"
    card.write_bytes(card.read_bytes().replace(b"Notes:", b"Notes, \xff:") + b"\r\n## Mine\r\n")
    export(quantized, tmp_path / "packed")
    assert (tmp_path / "packed" / "README.dense.md").read_bytes() == card.read_bytes()
    (tmp_path / "usual").touch()
    found = [path for path in (tmp_path / "packed").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in found} == {(tmp_path / "usual").stat().st_mode}
    said = message(lambda: run(tmp_path / "packed", tmp_path / "again"), UnsupportedModelError)
    assert "was exported for other programs; give the directory that it was made from" in said


def test_exports_that_fail_leave_nothing(tmp_path: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr("niwaki.checkpoints.writing.reserve", full)
        assert "no space left" in message(lambda: export(quantized, tmp_path / "packed"), OutputError)
    claims = json.loads((quantized / "config.json").read_text())["pruning_config"]
    edit_json(quantized / "config.json", pruning_config={**claims, "blocks": [7, 9]})
    said = message(lambda: export(quantized, tmp_path / "packed"), CheckpointError)
    assert "config.json says that blocks (7, 9) are pruned" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
