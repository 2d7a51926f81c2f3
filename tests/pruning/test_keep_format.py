"""Models in FP8 and MXFP4 that stay in their format; transformers reads what is written, and is the judge."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

import niwaki
from niwaki.checkpoints.encodings import EncodedFloats
from niwaki.checkpoints.reading import SINGLE_NAME, Checkpoint
from niwaki.errors import OutputError, UsageError
from niwaki.models.formats import KeptFormat
from niwaki.models.streamed import StreamedModel
from niwaki.records.record import Record
from support.arguments import arguments
from support.command import Command
from support.covering import FULL, some
from support.encoded import in_fp8, in_mxfp4, split
from support.models import message, random_tokens, save_model
from support.runs import StopAt, files, raw, tensors

CALIBRATION, HELDOUT = random_tokens(8, 24), random_tokens(6, 24, seed=1)
BEST = "best:synthetic=0:epochs=1:batch=48:rate=0.005:healing=0"
#: Blocks that divide all matrices: with others transformers on a CPU takes the wrong scales.
EVEN = (4, 8)

fp8 = functools.partial(in_fp8, block=EVEN)
MAKERS: dict[str, Any] = {
    "fp8": fp8,
    "fp8 powers": functools.partial(in_fp8, powers=True),
    "fp8 half": functools.partial(in_fp8, dtype=torch.float16),
    "fp8 whole": functools.partial(in_fp8, block=None),
    "mxfp4": in_mxfp4,
}


def run(model: Path, out: Path, **changes: Any) -> Record:
    options: dict[str, Any] = {"effort": "fast", "keep_format": True, "calibration": CALIBRATION, "text": HELDOUT}
    return niwaki.prune(model, out, **arguments(**{"sparsity": 0.5, **options, **changes}))


def is_pruned(key: str) -> bool:
    return "_proj" in key and "bias" not in key


def unsigned(codes: Tensor) -> Tensor:
    """Codes, one in a byte."""
    if codes.dtype == torch.float8_e4m3fn:
        return codes.view(torch.uint8)
    return torch.stack([codes & 15, codes >> 4])


@pytest.mark.parametrize(
    ("case", "effort"), [*((case, "fast") for case in MAKERS), ("mxfp4", BEST), *[("fp8", BEST)] * FULL]
)
@pytest.mark.slow
def test_what_is_written(tmp_path: Path, case: str, effort: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    MAKERS[case](source)
    record = run(source, out, effort=effort)
    if effort == "fast":
        run(source, tmp_path / "usual", effort=effort, keep_format=False, blocks=(0, 1))
    before, after = load_file(source / SINGLE_NAME), load_file(out / SINGLE_NAME)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert (value.dtype, value.shape) == (after[key].dtype, after[key].shape)
        if not is_pruned(key):
            assert raw(value.reshape(-1)) == raw(after[key].reshape(-1)), key
    dense, pruned = Checkpoint(source), Checkpoint(out)
    zeros = total = 0
    for key, encoded in dense.encoded.items():
        values, codes = pruned.read(key), unsigned(after[encoded.keys[0]])
        if not is_pruned(key):
            continue
        assert not (codes == 8 if codes.ndim > values.ndim else codes == 128).any(), key  # no -0.0
        assert int((codes == 0).sum()) == int((values == 0).sum())
        assert isinstance(encoded, EncodedFloats)
        if encoded.format.dtype is None:
            scales = after[encoded.keys[1]].float()
            assert case == "mxfp4" or torch.equal(scales.log2(), scales.log2().round())
        if ".layers.0." in key and effort == "fast":  # of later blocks the inputs are not the same
            assert torch.equal(values == 0, Checkpoint(tmp_path / "usual").read(key) == 0), key
        zeros, total = zeros + int((values == 0).sum()), total + values.numel()
    assert case == "mxfp4" or zeros / total == pytest.approx(record.sparsity)
    assert record.sparsity == pytest.approx(0.5, abs=0.01)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == json.loads((source / "config.json").read_text())["quantization_config"]
    assert record.kept_format
    assert record.kept_format.startswith("MXFP4" if case == "mxfp4" else "FP8, ")
    assert any("written in that format again" in note for note in record.notes)
    assert not any("bfloat16" in note for note in record.notes)
    assert f"| format of the weights | {record.kept_format}: error" in (out / "README.md").read_text()
    assert Record.load(out / "niwaki.json").kept_format == record.kept_format


@pytest.mark.parametrize(
    ("make", "settings"),
    [(fp8, FineGrainedFP8Config(dequantize=True, weight_block_size=EVEN)), (in_mxfp4, Mxfp4Config(dequantize=True))],
)
@pytest.mark.parametrize("effort", ["fast", BEST])
@pytest.mark.slow
def test_transformers_reads_it(tmp_path: Path, make: Any, settings: Any, effort: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make(source)
    record = run(source, out, effort=effort)
    model = AutoModelForCausalLM.from_pretrained(out, quantization_config=settings, dtype=torch.bfloat16)
    layout = StreamedModel(Checkpoint(out), "cpu", "bfloat16").layout
    for key, value in model.state_dict().items():
        assert torch.equal(layout.read(key, torch.bfloat16), value.bfloat16()), key
    nn.Module.to(model, torch.float32)
    with torch.no_grad():
        logits = model(HELDOUT).logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, HELDOUT[:, 1:].flatten()).exp().item()
    assert record.perplexity["after"].value == pytest.approx(loss, rel=1e-4)
    assert niwaki.evaluate(out, HELDOUT).value == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_fp8_of_compressed_tensors(tmp_path: Path) -> None:
    """As `export` writes it: half of the codes become zero, and transformers reads the rest."""
    pytest.importorskip("compressed_tensors")
    dense = save_model(tmp_path / "dense", dtype=torch.bfloat16)
    model, out = tmp_path / "model", tmp_path / "out"
    niwaki.export(dense, model, "fp8")
    run(model, out)
    before, after = load_file(model / SINGLE_NAME), load_file(out / SINGLE_NAME)
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    pruned = [key for key in after if after[key].dtype == torch.float8_e4m3fn]
    assert len(pruned) == 2 * 7
    for key in pruned:
        assert after[key].float().count_nonzero() == after[key].numel() // 2
        scaled = (after[key].double() * after[f"{key}_scale"].double()).bfloat16()
        assert torch.equal(Checkpoint(out).read(key).bfloat16(), scaled)
    settings = [json.loads((path / "config.json").read_text())["quantization_config"] for path in (model, out)]
    assert settings[0] == settings[1]
    read = Checkpoint(out)
    by_hand = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    by_hand.load_state_dict({key: read.read(key) for key in by_hand.state_dict() if key in read.entries}, strict=False)
    by_it = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    right, found = (each(HELDOUT).logits.float() for each in (by_hand, by_it))
    assert (found - right).norm() < 0.1 * right.norm()  # it rounds inputs too


@pytest.mark.parametrize("case", MAKERS)
@pytest.mark.slow
def test_weights_that_stay_keep_their_codes(tmp_path: Path, case: str) -> None:
    """Wanda changes none, so all that is written is what it is without the format, to the bit."""
    source, out, usual = (tmp_path / name for name in ("source", "out", "usual"))
    MAKERS[case](source)
    one, other = run(source, out, solver="wanda"), run(source, usual, solver="wanda", keep_format=False)
    before, after = load_file(source / SINGLE_NAME), load_file(out / SINGLE_NAME)
    found, expected = Checkpoint(out), Checkpoint(usual)
    assert [(each.name, each.error) for each in one.matrices] == [(each.name, each.error) for each in other.matrices]
    for key in expected.entries:
        assert torch.equal(found.read(key), expected.read(key)), key
    for key, encoded in found.encoded.items():
        codes, scales = encoded.keys
        assert torch.equal(before[scales], after[scales])
        old, new = unsigned(before[codes]), unsigned(after[codes])
        assert torch.equal(new, torch.where(new == 0, 0, old)), key
    assert any("what is written is in bfloat16" in note for note in other.notes)


@pytest.mark.slow
def test_only_some_blocks(tmp_path: Path) -> None:
    in_mxfp4(tmp_path / "source")
    run(tmp_path / "source", tmp_path / "out", blocks=(1, 2))
    before, after = tensors(tmp_path / "source"), tensors(tmp_path / "out")
    changed = {key for key, value in before.items() if raw(value) != raw(after[key])}
    assert changed
    assert all(".layers.1." in key for key in changed)


@pytest.mark.parametrize("make", some([in_mxfp4, in_fp8], 1))
@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, make: Any) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make(source)
    split(source)
    run(source, tmp_path / "whole", effort=BEST)
    first = len([m for m in StreamedModel(Checkpoint(source), "cpu").matrices() if m.block == 0])
    with pytest.raises(KeyboardInterrupt):
        run(source, out, effort=BEST, progress=StopAt(first + 2))
    said = message(lambda: run(source, out, effort=BEST, keep_format=False))
    assert "keep_format (True there, False here)" in said
    assert run(source, out, effort=BEST).resumed == [1]
    assert files(out) == files(tmp_path / "whole")
    run(source, tmp_path / "little", effort=BEST, max_memory=1)
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "little" / path.name).read_bytes() == (out / path.name).read_bytes()


@pytest.mark.parametrize("make", some([in_fp8, in_mxfp4], 1))
@pytest.mark.slow
def test_what_comes_after(tmp_path: Path, make: Any) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make(source)
    run(source, out, measure="none")
    lent = run(source, tmp_path / "lent", mask_from=out, sparsity=None, measure="none")
    found, other = Checkpoint(out), Checkpoint(tmp_path / "lent")
    for key in found.encoded:
        assert torch.equal(found.read(key) == 0, other.read(key) == 0)
    assert lent.sparsity == pytest.approx(0.5, abs=0.01)
    more = run(out, tmp_path / "more", sparsity=0.6, measure="none")
    assert more.sparsity == pytest.approx(0.6, abs=0.01)
    healed = niwaki.heal(out, tmp_path / "healed", source, tokens=96, batch=48, calibration=random_tokens(40, 24))
    assert any("what is written is in bfloat16" in note for note in healed.notes)
    assert not Checkpoint(tmp_path / "healed").is_encoded
    for key in found.encoded:
        assert torch.equal(found.read(key) == 0, Checkpoint(tmp_path / "healed").read(key) == 0)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    in_fp8(tmp_path / "source")
    save_model(tmp_path / "plain")
    for model, changes, said in (
        ("plain", {}, "neither in FP8 nor in MXFP4"),
        ("source", {"quantize": "int4"}, "on the grid int4 or keep their format, not both"),
    ):
        assert said in message(lambda m=model, c=changes: run(tmp_path / m, tmp_path / "out", **c), UsageError)  # type: ignore[misc]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "source"]


def test_the_command(tmp_path: Path, niwaki_: Command) -> None:
    save_model(tmp_path / "plain")
    result = niwaki_("prune", str(tmp_path / "plain"), str(tmp_path / "out"), "--sparsity", "0.5", "--keep-format")
    assert result.code == 2
    assert "there is no format to keep; leave out --keep-format" in result.err


@pytest.mark.slow
def test_what_is_not_on_disk_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    in_mxfp4(source)
    write = KeptFormat.write

    def damaging(self: KeptFormat, writer: Any, matrix: Any, stored: Tensor, parts: Sequence[Tensor]) -> None:
        write(self, writer, matrix, stored, parts)
        entry = writer._entries[self.places(matrix)[0][0]].at(matrix.index)
        file = writer._files[entry.shard]
        file.seek(entry.offset)
        byte = file.read(1)[0]
        file.seek(entry.offset)
        file.write(bytes([byte ^ 7]))

    with monkeypatch.context() as patch:
        patch.setattr(KeptFormat, "write", damaging)
        said = message(lambda: run(source, tmp_path / "out"), OutputError)
    assert "is not on disk as it was written" in said
    kept = KeptFormat(Checkpoint(source))
    (matrix, *_) = [m for m in StreamedModel(kept.checkpoint, "cpu").matrices() if kept.of(m)]
    other = torch.full(matrix.shape[::-1], 0.3, dtype=torch.bfloat16)  # is no number of the format
    assert "weights that are not in its format, MXFP4" in message(
        lambda: kept.write(None, matrix, other, (kept.scales(matrix),)),  # type: ignore[arg-type]
        OutputError,
    )
    run(source, tmp_path / "out", restart=True)
    zeros = {key: int((Checkpoint(tmp_path / "out").read(key) == 0).sum()) for key in kept.checkpoint.encoded}
    kept.verify(tmp_path / "out", kept.checkpoint.stored, [], zeros)
    zeros[next(iter(zeros))] += 1
    said = message(lambda: kept.verify(tmp_path / "out", kept.checkpoint.stored, [], zeros), OutputError)
    assert "zeros on disk" in said
