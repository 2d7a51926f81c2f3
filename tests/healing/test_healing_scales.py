"""Training of the scales of a grid: whole numbers and zeros stay to the bit, in every kind of grid and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import niwaki
from niwaki import Compute, Measurement
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UnsupportedModelError
from niwaki.healing import whole
from niwaki.layer.block_types import BLOCK_TYPES, BlockGrid
from niwaki.models.formats import OnGrid, format_of
from niwaki.models.scales import FILE
from niwaki.models.streamed import StreamedModel
from niwaki.options import SCALES_RATE
from niwaki.records.progress import Progress
from support.healing import TOKENS, curve, divergences, heal, healing_of, held
from support.models import FEW_TOKENS, add_small_tokenizer, message, random_model, random_tokens, save_model
from support.runs import files, tensors

#: Random models learn by heart what little text they are given.
MORE = random_tokens(400, 16)
#: Each kind of grid, and each layout of matrices: on their own, joined, transposed, experts one by one and in one.
CASES = [
    *(("llama grouped", "int4:8"), ("phi3", "int3:8"), ("gpt2", "int3"), ("mixtral", "int4:8"), ("gpt_oss", "int4:8")),
    *(("llama wide", "q4_k"), ("llama wide", "q3_k"), ("llama wide", "iq4_nl"), ("llama wide", "q5_1")),
    *(("llama wide", "q4.25"), ("llama wide", "int3.5:64")),
]


def wide(path: Path, dtype: torch.dtype) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": FEW_TOKENS}
    random_model("llama grouped", dtype=dtype, **sizes).save_pretrained(path)
    return add_small_tokenizer(path)


def quantized(path: Path, case: str, grid: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    dense, out = path / "dense", path / "quantized"
    if case == "llama wide":
        wide(dense, dtype)
    else:
        save_model(dense, case, dtype=dtype)
    niwaki.quantize(dense, out, grid, effort="fast", calibration=TOKENS, measurement=None, compute="cpu")
    return dense, out


@pytest.mark.slow
@pytest.mark.parametrize(("case", "grid"), CASES)
def test_whole_numbers_stay(tmp_path: Path, case: str, grid: str) -> None:
    dense, before = quantized(tmp_path, case, grid)
    out = tmp_path / "out"
    record = heal(
        before, out, dense, method="scales", tokens=4000, rate=0.0003 if "wide" in case else 0.001, calibration=MORE
    )
    points, best = curve(record)
    assert best.error < points[0].error
    measured = divergences(dense, [before, out], held(record, MORE))
    assert [points[0].error, best.error] == pytest.approx(measured, rel=0.03)
    first, last = Checkpoint(before), Checkpoint(out)
    way = format_of(last)
    assert isinstance(way, OnGrid)
    changed = 0
    for matrix in StreamedModel(last, "cpu").matrices():
        (old,), (new,) = (way.read_parts(each, matrix) for each in (first, last))
        on, W = way.grid_of(matrix), matrix.read(last).float()
        codes = on.codes(matrix.read(first).float(), old.float())
        assert torch.equal(on.codes(W, new.float()), codes)
        assert torch.equal(W, on.values(codes, new.float(), W.dtype))
        changed += not torch.equal(old, new)
        if isinstance(on, BlockGrid):  # what llama.cpp has in whole numbers stays too
            assert torch.equal(old[:, 0], new[:, 0])
            assert torch.equal(old[:, 2::2], new[:, 2::2])
    assert changed
    if way.keeps_zeros:
        after = tensors(out)
        assert all(torch.equal(after[key] == 0, value == 0) for key, value in tensors(before).items() if value.ndim > 1)


@pytest.mark.parametrize("name", [*BLOCK_TYPES])
def test_free_numbers_are_put_back(name: str) -> None:
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(0)
    grid = BlockGrid(kind.bits, name)
    scales = grid.scales(torch.randn(3, 512, generator=generator), torch.ones(512), torch.float16)
    free = grid.free(scales)
    assert free.shape == (3, 512 // kind.block * (2 if kind.minimum else 1))
    assert torch.equal(grid.with_free(scales, free), scales)
    twice = grid.with_free(scales, 2 * free)
    codes = torch.randint(kind.levels[0], kind.levels[0] + 2, (3, 512), generator=generator).float()
    if kind.is_table:
        codes = kind.nearest(codes)
    torch.testing.assert_close(grid.values(codes, twice, torch.float16), 2 * grid.values(codes, scales, torch.float16))


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["int4:64", "q4_k"])
def test_all_that_reads_the_model_reads_the_result(tmp_path: Path, grid: str) -> None:
    """Packed, and in llama.cpp's file, the numbers are those that were trained; with embeddings on a grid after it."""
    gguf: Any = pytest.importorskip("gguf")
    dense = wide(tmp_path / "dense", torch.bfloat16)
    options: dict[str, Any] = {"calibration": MORE, "measurement": None, "compute": Compute("cpu", "float32")}
    first, last = f"quantize {grid} effort=fast", "embeddings int8:64"
    healing = "heal method=scales tokens=4000 rate=0.0005 batch=64 own_text=0"
    niwaki.run(dense, tmp_path / "out", [first, healing, last], **options)
    niwaki.run(dense, tmp_path / "alone", [first, last], **options)
    assert (tmp_path / "out" / FILE).read_bytes() != (tmp_path / "alone" / FILE).read_bytes()
    own = tensors(tmp_path / "out")
    if grid == "q4_k":
        niwaki.export(tmp_path / "out", tmp_path / "model.gguf", "gguf")
        read = {each.name: each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}["blk.1.ffn_up.weight"]
        assert read.tensor_type.name == "Q4_K"
        values = torch.from_numpy(gguf.quants.dequantize(read.data, read.tensor_type)).bfloat16()
        assert torch.equal(values, own["model.layers.1.mlp.up_proj.weight"])
        return
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    niwaki.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert all(torch.equal(value, own[key]) for key, value in tensors(tmp_path / "unpacked").items())


class Watched(Progress):
    """Keeps what is said of a training, and interrupts it at a sign of life, by its number."""

    def __init__(self, number: int = 0) -> None:
        self.left = number
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def healing(self, record: Any, share: float, seconds: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.01, None])
def test_a_stopped_run_resumes(tmp_path: Path, rate: float | None) -> None:
    dense, before = quantized(tmp_path, "llama grouped", "int4:8")
    options: dict[str, Any] = {"method": "scales", "tokens": 1000, "rate": rate}
    usual = healing_of(heal(before, tmp_path / "whole", dense, **options))
    with pytest.raises(KeyboardInterrupt):
        heal(before, tmp_path / "out", dense, progress=Watched(6), **options)
    assert healing_of(heal(before, tmp_path / "out", dense, **options)).rate == usual.rate
    whole, out = files(tmp_path / "whole"), files(tmp_path / "out")
    assert {name: out[name] for name in out if name.endswith(".safetensors")} == {
        name: whole[name] for name in whole if name.endswith(".safetensors")
    }


@pytest.mark.parametrize(("enough", "is_lowered"), [(0.3, True), (0.001, False)])
def test_the_usual_rate_goes_by_the_root_of_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: float, is_lowered: bool
) -> None:
    (dense, before), watched = quantized(tmp_path, "llama grouped", "int4:8"), Watched()
    monkeypatch.setattr(whole, "_FULL_RATE", enough)
    options: dict[str, Any] = {"method": "scales", "tokens": 320, "progress": watched}
    healing = healing_of(heal(before, tmp_path / "out", dense, rate=None, **options))
    lost = healing.points[0].error
    assert (lost < enough) == is_lowered
    assert healing.rate == pytest.approx(SCALES_RATE * (lost / enough) ** 0.5 if is_lowered else SCALES_RATE)
    assert any("for what is lost, the learning rate is" in note for note in watched.notes)
    assert healing_of(heal(before, tmp_path / "given", dense, rate=SCALES_RATE, **options)).rate == SCALES_RATE


def test_a_scale_keeps_its_sign_and_size(tmp_path: Path) -> None:
    """However far the steps go: a rate without reason leaves scales within four times of what they were."""
    dense, before = quantized(tmp_path, "llama grouped", "int4:8")
    heal(before, tmp_path / "out", dense, method="scales", tokens=320, rate=50.0)
    first, last = Checkpoint(before), Checkpoint(tmp_path / "out")
    way = format_of(last)
    for matrix in StreamedModel(last, "cpu").matrices():
        (old,), (new,) = (way.read_parts(each, matrix) for each in (first, last))
        assert ((new / old >= 0.25) & (new / old <= 4)).all()


def test_what_has_no_scales(tmp_path: Path) -> None:
    dense = wide(tmp_path / "dense", torch.float32)
    given: dict[str, Any] = {"calibration": TOKENS[:4], "measurement": Measurement(samples=0), "compute": "cpu"}
    for pattern in ("0.5", "two-factors:0.5"):
        out = tmp_path / pattern.partition(":")[0]
        niwaki.prune(dense, out, pattern, effort="fast", **given)
        refused = message(lambda out=out: heal(out, tmp_path / "h", dense, method="scales"), UnsupportedModelError)  # type: ignore[misc]
        assert "on no grid whose scales could be trained; quantize to whole numbers first" in refused
        assert not (tmp_path / "h").exists()
    for stages in (["prune 0.5"], ["prune two-factors:0.5 quantize=int8"]):
        stages = [*(f"{each} effort=fast" for each in stages), "heal method=scales"]
        refused = message(lambda stages=stages: niwaki.run(dense, tmp_path / "h", stages, **given))  # type: ignore[misc]
        assert "the stages before it leave none that can be; quantize to whole numbers first" in refused


@pytest.mark.slow
def test_blocks_that_were_left_out(tmp_path: Path) -> None:
    """The file of scales has those of the blocks on the grid alone, as before."""
    dense, before = wide(tmp_path / "dense", torch.bfloat16), tmp_path / "before"
    given: dict[str, Any] = {"calibration": TOKENS, "measurement": None, "compute": "cpu"}
    niwaki.prune(dense, before, 0.5, effort="fast", quantize="int4:64", blocks="0:1", **given)
    heal(before, tmp_path / "out", dense, method="scales", tokens=640, rate=0.002)
    first, last = ({*load_file(each / FILE)} for each in (before, tmp_path / "out"))
    assert first == last
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "whose scales, norms and biases niwaki trained towards" in card
