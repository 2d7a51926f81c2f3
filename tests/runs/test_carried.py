"""What the output has besides weights: found and checked before anything else is read."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import niwaki
from niwaki import Heal, Prune, Quantize, QuantizeEmbeddings, Record, Shrink, ShrinkVocabulary, prune, shrink
from niwaki.checkpoints.reading import INDEX_NAME, Checkpoint
from niwaki.errors import CheckpointError, NiwakiError, OutputError
from niwaki.models import formats, scales
from niwaki.models.locate import locate_model
from niwaki.packed.pack import pack, unpack
from niwaki.runs.carried import find_carried
from niwaki.runs.workplace import unfinished_size
from support.arguments import arguments
from support.models import edit_json, message, save_model, sparse_model
from support.runs import check_claims, listing, run, stopped
from support.small_tokenizers import TEXT, save_with_tokenizer


def _deep(path: Path) -> None:
    below = path.joinpath(*["d"] * 120)
    below.mkdir(parents=True)
    (below / "x").write_text("x")


def _folder_with(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        path.mkdir()
        make(path / "x")

    return made


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("notes.txt", lambda path: path.symlink_to("nowhere"), "is a link that leads nowhere"),
        ("notes.bin", lambda path: path.symlink_to("nowhere"), "is a link that leads nowhere"),
        ("notes.txt", lambda path: path.symlink_to("notes.txt"), "is a link that leads nowhere"),
        ("notes.txt", lambda path: path.symlink_to("n" * 300), "File name too long"),
        ("notes", _folder_with(os.mkfifo), "notes/x is not a file"),
        ("notes", lambda path: path.symlink_to(".."), "notes is a link to a directory outside of the model's"),
        ("notes", _folder_with(lambda path: path.symlink_to("../..")), "notes/x is a link to a directory outside of"),
        ("deep", _deep, "too many folders"),
        ("README.base.md", _folder_with(Path.touch), "a name that niwaki gives"),
        ("niwaki.json", _folder_with(Path.touch), "a name that niwaki gives"),
        ("quantization", Path.touch, "a name that niwaki gives"),
        (".partial.json", Path.touch, "a name that niwaki gives"),
    ],
)
def test_what_cannot_be_carried_over(
    tmp_path: Path, model: Path, name: str, make: Callable[[Path], Any], said: str
) -> None:
    make(model / name)
    before = listing(tmp_path)
    for work in (lambda: prune(model, tmp_path / "out", 0.5), lambda: shrink(model, tmp_path / "out", neurons=0.5)):
        assert said in message(work, CheckpointError)  # the model has no tokenizer, which is seen later
    assert listing(tmp_path) == before


def test_what_is_never_carried_over_may_be_broken(tmp_path: Path, model: Path) -> None:
    (model / ".git").mkdir()
    (model / ".git" / "x").symlink_to("nowhere")
    (model / "packed.json").write_text("{}")
    find_carried(Checkpoint(model), tmp_path).copy(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "generation_config.json"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_and_devices(model: Path, make: Callable[[Path], Any]) -> None:
    """Who reads tokenizer.json would wait for ever."""
    make(model / "tokenizer.json")
    assert "not a file but a pipe, a socket or a device" in message(lambda: locate_model(str(model)), CheckpointError)


def test_a_shard_that_is_called_like_our_plan(tmp_path: Path, model: Path) -> None:
    keys = list(Checkpoint(model).entries)
    (model / "model.safetensors").rename(model / "plan.safetensors")
    (model / INDEX_NAME).write_text('{"weight_map": {}}')
    edit_json(model / INDEX_NAME, weight_map=dict.fromkeys(keys, "plan.safetensors"))
    run(model, tmp_path / "out", effort="fast:allocation=error")
    assert list(Checkpoint(tmp_path / "out").entries) == keys


def test_names_that_are_not_utf_8(tmp_path: Path, model: Path) -> None:
    for name in ("\udcff.txt", "\udcff.bin"):
        (model / name).write_text("x")
    record = run(model, tmp_path / "out")
    assert (tmp_path / "out" / "\udcff.txt").read_text() == "x"
    assert "\udcff.bin" in record.notes[-1]
    assert "dense weights: \\\\udcff.bin" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ([INDEX_NAME], []),  # of shards that are not there
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], []),
        (["model.fp16.safetensors", "model.safetensors.index.fp16.json", "m.fp16.safetensors.index.json"], []),
        (["consolidated.safetensors", "consolidated.safetensors.index.json", "params.json"], ["tekken.json"]),
        (["original/consolidated.00.pth", "original/params.json", "original/tokenizer.model"], ["tokenizer.model"]),
        (["onnx/model.onnx", "onnx/model.onnx_data", "onnx/config.json", "onnx/onnx__MatMul_1"], []),
        (["model.onnx", "model.onnx.data", "model_q4.onnx_data_1"], ["model.json"]),
        (["openvino_model.bin", "openvino_model.xml", "openvino_config.json"], ["config.xml"]),
        (["coreml/m.mlpackage/Data/weights/weight.bin", "coreml/m.mlpackage/Manifest.json"], []),
        (["checkpoint-5/model.safetensors", "checkpoint-5/trainer_state.json"], ["trainer_state.json"]),
        (["training_args.bin", "optimizer.pt", "rng_state_0.pth"], []),
        (["model.ckpt.data-00000-of-00001", "model.ckpt.index", "model.ckpt.meta", "checkpoint"], []),
        (["adapter_model.safetensors", "adapter_config.json"], []),
        (["tf_model.h5", "flax_model.msgpack", "rust_model.ot", "weights.00.npz", "m.gguf"], []),
        ([], ["adapter_config.json", "params.json", "notes/params.json", "calibration.npz", "some.index.json"]),
    ],
    ids=lambda value: value[0] if value else "",
)
def test_what_belongs_to_other_weights_stays_with_them(
    tmp_path: Path, model: Path, left: list[str], kept: list[str]
) -> None:
    for name in (*left, *kept):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text("{}")
    carried = find_carried(Checkpoint(model), tmp_path)
    assert sorted(map(str, carried.left)) == sorted(left)
    assert {*map(str, carried.names)} >= {*kept}
    assert len(carried.notes) == bool(left)


def test_layers_behind_a_transformer_are_carried_over(tmp_path: Path, model: Path) -> None:
    """Those of sentence-transformers: they are no form of the model, and without them it does not load there."""
    (model / "modules.json").write_text(
        '[{"path": "", "type": "Transformer"}, {"path": "1_Pooling"}, {"path": "2_Dense"}]'
    )
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/model.bin"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    carried = find_carried(Checkpoint(model), tmp_path)
    assert list(map(str, carried.left)) == ["3_Dense/model.bin"]
    for odd in ("3", "{", '[{"path": 3}, 4]', '{"path": 3}'):
        (model / "modules.json").write_text(odd)
        assert len(find_carried(Checkpoint(model), tmp_path).left) == 3


def test_the_note_is_short(tmp_path: Path, model: Path) -> None:
    for number in range(30):
        (model / f"pytorch_model-{number:05}-of-00030.bin").write_bytes(bytes(100))
        (model / f"other-{number}.gguf").touch()
    (note,) = find_carried(Checkpoint(model), tmp_path).notes
    assert "60 files, 2.93 KiB" in note
    assert len(note) < 250
    assert "and 25 more" in note


def test_folders_are_named_as_a_whole(tmp_path: Path, model: Path) -> None:
    for name in ("original/a.pth", "original/params.json", "original/notes/x.txt", "onnx/a.onnx"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).touch()
    carried = find_carried(Checkpoint(model), tmp_path)
    assert carried.notes[0].endswith(": onnx/a.onnx, original/")
    assert Path("original/notes/x.txt") in carried.names


def test_weights_that_are_there_twice(tmp_path: Path, model: Path) -> None:
    """A whole file beside shards: which is read is said at the start, but not of an old list of shards."""
    twice = save_model(tmp_path / "shards", shards=True)
    assert not Checkpoint(twice).notes
    for file in twice.glob("model*"):
        (model / file.name).write_bytes(file.read_bytes())
    record = run(model, tmp_path / "out")
    assert "appear twice: model.safetensors is read" in record.notes[0]
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    min(model.glob("model-*")).unlink()
    assert not Checkpoint(model).notes
    for text in ("{", '{"weight_map": {"a": "../a"}}'):
        (model / INDEX_NAME).write_text(text)
        assert not Checkpoint(model).notes


def test_an_old_index_is_not_packed(tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model")
    (model / INDEX_NAME).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    pack(model, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "back")
    assert not (tmp_path / "back" / INDEX_NAME).exists()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_room_for_all_of_it(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an unfinished run has written is room, too."""
    out, large = tmp_path / "out", model / "large.txt"
    large.write_bytes(bytes(1 << 20))
    stopped(model, out)
    held = unfinished_size(out)
    assert held > 1 << 20
    needed = (1 << 24) + sum(path.stat().st_size for path in model.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - held - 1))
    before = listing(tmp_path)
    said = message(lambda: run(model, out), OutputError)
    assert "no space left on disk" in said
    assert "the output needs 0.02 GiB" in said
    assert listing(tmp_path) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - held))
    run(model, out)
    assert (out / "large.txt").stat().st_size == 1 << 20


_FACTORS = "double-sparse:rounds=2"
#: Models that niwaki made, by the stages that made them.
_MADE: dict[str, list[Any]] = {
    "zeros": [Prune(0.5, "magnitude")],
    "zeros of a block": [Prune("2:4", "magnitude", blocks="0:1")],
    "grid": [Quantize("int4:32", effort="none")],
    "grid of a block": [Prune(0.0, "magnitude", quantize="int4:32", blocks="1:2")],
    "zeros, mixed bits, embeddings": [Prune(0.5, "wanda"), Quantize("int4.5:64"), QuantizeEmbeddings("int8:32")],
    "factors": [Prune("two-factors:0.5", _FACTORS)],
    "factors on a grid, embeddings": [
        Prune("two-factors:0.5", _FACTORS, quantize="int8:64"),
        QuantizeEmbeddings("int8:32"),
    ],
}
#: What is done to these then, and which of config.json's claims stays.
_DONE: dict[str, list[Any]] = {
    "prune": [Prune(0.7, "magnitude")],
    "prune a block": [Prune(0.7, "magnitude", blocks="1:2")],
    "quantize": [Quantize("int8:64")],
    "heal": [Heal(tokens=128, batch=64)],
    "fewer blocks": [Shrink(blocks=1)],
    "fewer neurons": [Shrink(neurons=0.25)],
    "fewer tokens": [ShrinkVocabulary(300)],
    "fewer tokens, heal": [ShrinkVocabulary(300), Heal(tokens=128, batch=64)],
    "fewer tokens, prune, embeddings": [ShrinkVocabulary(300), Prune(0.7, "magnitude"), QuantizeEmbeddings("int8:64")],
}


def _work(model: Path, out: Path, stages: list[Any], dense: Path) -> Record:
    text = model.parent / "text.txt"
    text.write_text(TEXT * 20)
    options = arguments(calibration=str(text), samples=4, length=32, text_samples=0, device="cpu", dtype="float32")
    stages = [
        Heal(tokens=each.tokens, batch=each.batch, teacher=dense) if each.name == "heal" else each for each in stages
    ]
    return niwaki.run(model, out, stages, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    place = tmp_path_factory.mktemp("made")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": False}
    dense = save_with_tokenizer(place / "dense", "bytes", "llama grouped", **sizes)

    @functools.cache
    def make(kind: str) -> tuple[Path, Path]:
        out = place / kind
        _work(dense, out, _MADE[kind], dense)
        check_claims(out)
        return dense, out

    return make


@pytest.mark.parametrize("done", _DONE)
@pytest.mark.parametrize("kind", _MADE)
def test_what_config_json_says_stays_true(
    tmp_path: Path, made: Callable[[str], tuple[Path, Path]], kind: str, done: str
) -> None:
    """Of each kind of model that niwaki makes, after each stage: it is kept, measured anew, or dropped with a note."""
    dense, model = made(kind)
    before, stages = Checkpoint(model).pruning, _DONE[done]
    if before.has_factors and not all(stage.keeps_factors for stage in stages):
        message(lambda: _work(model, tmp_path / "out", stages, dense), NiwakiError)
        assert not (tmp_path / "out").exists()
        return
    record = _work(model, tmp_path / "out", stages, dense)
    check_claims(tmp_path / "out")
    after = Checkpoint(tmp_path / "out").pruning
    assert (after.embeddings is None) == (before.embeddings is None and stages[-1].name != "embeddings")
    if all(stage.keeps_matrices for stage in stages):
        assert (after.quantization, after.blocks) == (before.quantization, before.blocks)
        assert after.sparsity == pytest.approx(before.sparsity, abs=1e-3) or done.endswith("heal")
    elif before.quantization:
        assert any(f"are on the grid {before.quantization}" in note for note in record.notes)
    if done == "fewer blocks" and before.sparsity:
        assert after.sparsity > 0


@pytest.mark.parametrize("kind", [kind for kind in _MADE if "grid" in kind or "factors" in kind])
def test_it_packs_as_small_with_fewer_tokens(
    tmp_path: Path, made: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    dense, model = made(kind)
    _work(model, tmp_path / "out", [ShrinkVocabulary(300)], dense)
    before, after = (pack(path, tmp_path / f"packed {path.name}") for path in (model, tmp_path / "out"))
    assert after.packed / after.matrices == pytest.approx(before.packed / before.matrices, abs=0.01)


@pytest.mark.parametrize("kind", ["grid", "factors on a grid, embeddings"])
def test_files_and_config_json_that_differ(tmp_path: Path, made: Callable[[str], tuple[Path, Path]], kind: str) -> None:
    """Files of scales or factors without a word of them, or the other way round, are refused before there is OUT."""
    dense, model = made(kind)
    works: list[Callable[[Path, Path], Any]] = [
        lambda path, out: _work(path, out, [ShrinkVocabulary(300)], dense),
        lambda path, out: _work(path, out, [Heal(tokens=128, batch=64)], dense),
        lambda path, out: _work(path, out, [Prune(0.5, "magnitude")], dense),
        pack,
    ]
    for file in (scales.FILE, scales.EMBEDDINGS, formats.FACTORS_FILE):
        path = tmp_path / file.replace("/", " ")
        shutil.copytree(model, path)
        if (there := path / file).exists():
            there.unlink()
        else:
            there.parent.mkdir(exist_ok=True)
            there.write_bytes((path / "model.safetensors").read_bytes())
        for work in works:
            said = message(lambda work=work, path=path: work(path, tmp_path / "out"), NiwakiError)  # type: ignore[misc]
            assert file in said or "was pruned to two factors" in said
            assert not (tmp_path / "out").exists()


def test_a_healed_model_is_pruned_and_healed_again(tmp_path: Path, made: Callable[[str], tuple[Path, Path]]) -> None:
    """What it was before it was healed is said of that alone."""
    dense, model = made("zeros")
    heal: list[Any] = [Heal(tokens=128, batch=64)]
    for number, stages in enumerate([heal, [Prune(0.7, "magnitude")], heal]):
        out = tmp_path / str(number)
        _work(model, out, stages, dense)
        assert (out / "niwaki.base.json").exists() == (stages is heal)
        model = out
    assert Record.load(model / "niwaki.base.json").sparsity == pytest.approx(0.7, abs=1e-3)
