"""Packed model directories: there and back, loaded, and damaged."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JambaConfig

import niwaki
from niwaki.checkpoints.tensors import DTYPES
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError
from niwaki.evaluation.evaluate import evaluate
from niwaki.models.scales import FILE as SCALES
from niwaki.options import Calibration, Measurement
from niwaki.packed import kernels
from niwaki.packed.format import Index, PackedCheckpoint
from niwaki.packed.linear import SparseLinear
from niwaki.packed.matrix import PADDING, pack
from niwaki.records.progress import Progress
from niwaki.runs.workplace import Workplace
from support.models import (
    SIZES as SMALL,
    a_third_of_the_families,
    edit_json,
    edited,
    is_pruned,
    message,
    random_tokens,
    reference,
    save_model,
    save_model_with_tokenizer,
    sparse_model,
)
from support.packed import SIZES, Raw, component_names, decode, forged, read_file, scaled, write_index
from support.runs import StopAt
from support.sparse import model_on_a_grid, sparse

#: One of each way in which files and modules can have their weights.
KINDS = ("llama", "llama biases", "gpt2", "opt", "falcon", "mixtral", "llama4_text", "gpt_oss", "gemma3")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return sparse_model(tmp_path / "model")


@pytest.fixture
def packed(model: Path, tmp_path: Path) -> Path:
    niwaki.pack(model, tmp_path / "packed")
    return tmp_path / "packed"


def same_files(a: Path, b: Path) -> bool:
    """Whether two directories hold the same files, byte for byte."""
    names = [sorted(str(p.relative_to(d)) for p in d.rglob("*") if p.is_file()) for d in (a, b)]
    return names[0] == names[1] and all((a / n).read_bytes() == (b / n).read_bytes() for n in names[0])


def there_and_back(model: Path, progress: Progress | None = None) -> Any:
    """The sizes of a model that is packed beside it, and from which the same files come back."""
    sizes = niwaki.pack(model, packed := model.parent / "packed", progress)
    niwaki.unpack(packed, again := model.parent / "again")
    assert same_files(model, again)
    return sizes


@a_third_of_the_families(0)
@pytest.mark.slow
def test_every_family_there_and_back(case: str, tmp_path: Path) -> None:
    sizes = there_and_back(sparse_model(tmp_path / "model", case, dtype=torch.bfloat16, sparsity=0.9))
    assert sizes.packed < sizes.matrices


def as_documented(directory: Path) -> dict[str, torch.Tensor]:
    """The dense tensors, read and checked as docs/format.md has it."""
    index = json.loads((directory / "packed.json").read_text())
    digest = index.pop("sha256")
    assert hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest() == digest
    assert (index["format"], index["version"]) == ("niwaki-packed", 7)
    kind = {"quant_method": "niwaki-packed", "version": 7}
    config = {**json.loads(index["config"]), "quantization_config": kind}
    assert json.loads((directory / "config.json").read_text()) == config
    for key, stored in index["tensors"].items():
        there = read_file(directory / stored["file"])
        content = b"".join(there[name][2] for name in component_names(key, stored))
        assert hashlib.sha256(content).hexdigest() == stored["sha256"]
    return {
        key: torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(shape)
        for key, (dtype, shape, data) in decode(directory).items()
    }


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_oss"])
@pytest.mark.slow
def test_the_format_is_as_documented(case: str, tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model", case, dtype=torch.bfloat16)
    calls: list[tuple[int, int]] = []

    class Calls(Progress):
        def status(self, what: str, done: int = 0, count: int = 0) -> None:
            calls.append((done, count))

    sizes = niwaki.pack(model, tmp_path / "packed", Calls())
    expected, found = load_file(model / "model.safetensors"), as_documented(tmp_path / "packed")
    count = len(expected)
    assert calls == [(number + 1, count) for number in range(count)]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    checkpoint = PackedCheckpoint(tmp_path / "packed")
    for key, value in expected.items():
        assert torch.equal(checkpoint.read(key), value)
        assert torch.equal(checkpoint.read(key, 1), value[1])
    # What it says about itself.
    stored = Index.read(tmp_path / "packed").tensors
    before = {key: value.nbytes for key, value in expected.items() if stored[key].packed}
    assert {key for key in expected if is_pruned(case, key) and expected[key].ndim > 1} == before.keys()
    after = {
        key: math.prod(tensor.untransposed[:-1]) * math.ceil(tensor.untransposed[-1] / 64) * 8 + 2 * (tensor.count + 64)
        for key, tensor in stored.items()
        if tensor.packed
    }
    dense = sum(value.nbytes for value in expected.values())
    assert (sizes.matrices, sizes.packed) == (sum(before.values()), sum(after.values()))
    assert (sizes.dense, sizes.total) == (dense, dense - sizes.matrices + sizes.packed)
    calls.clear()
    niwaki.unpack(tmp_path / "packed", tmp_path / "again", Calls())
    assert calls == [(number + 1, count) for number in range(count)]


def test_shards_and_other_files(tmp_path: Path) -> None:
    """Several files, one with tensors in an order of its own, and what lies beside the weights."""
    model = sparse_model(tmp_path / "model", shards=True)
    (model / "README.md").write_text("a model")
    (model / "more").mkdir()
    (model / "more" / "notes.txt").write_text("notes")
    there_and_back(model)
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert "packed.json" in names
    assert not [name for name in names if name.startswith("model")]


def test_size(tmp_path: Path) -> None:
    """Of matrices with 4,096 inputs, in bfloat16: a bit for each weight, 16 for each that is left, and no more."""
    model = sparse_model(tmp_path / "model", dtype=torch.bfloat16, sparsity=0.5)
    sizes = niwaki.pack(model, tmp_path / "packed")
    on_disk = sum(file.stat().st_size for file in (tmp_path / "packed").glob("*.safetensors"))
    assert sizes.total <= on_disk <= sizes.total + 20_000
    for sparsity, most in ((0.5, 0.57), (0.7, 0.37)):
        W = sparse(64, 4096, sparsity)[3:]
        packed = pack(W)
        assert packed.mask is not None
        exact = W.numel() / 8 + 2 * int(W.count_nonzero()) + 2 * PADDING
        assert packed.mask.nbytes + packed.values.nbytes == exact
        assert packed.nbytes < most * W.nbytes


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.slow
def test_loads_as_the_same_model(case: str, tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model", case)
    niwaki.pack(model, tmp_path / "packed")
    tokens = random_tokens(2, 20)
    loaded = niwaki.load(tmp_path / "packed", "cpu")
    assert any(isinstance(module, SparseLinear) for module in loaded.modules())
    with torch.no_grad():
        expected = reference(model)(tokens).logits
        assert torch.allclose(loaded(tokens).logits, expected, atol=1e-4)
        assert torch.allclose(niwaki.load(model, "cpu")(tokens).logits, expected, atol=1e-5)
        short = loaded(tokens[:1, :3]).logits  # few enough to be read as they are
        assert torch.allclose(short, reference(model)(tokens[:1, :3]).logits, atol=1e-4)


def test_nothing_packed_is_read_whole(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as large as memory has to load."""
    stored, read = Index.read(packed).tensors, []

    def recorded(self: PackedCheckpoint, key: str, part: int | None = None) -> torch.Tensor:
        read.append(key)
        return usual(self, key, part)

    usual = PackedCheckpoint.read
    monkeypatch.setattr(PackedCheckpoint, "read", recorded)
    niwaki.load(packed, "cpu")
    assert sorted(set(read)) == sorted(key for key in stored if not stored[key].packed)


@pytest.mark.slow
def test_without_the_library_it_says_so(
    model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    niwaki.load(packed, "cpu")
    monkeypatch.setattr(kernels, "library", lambda: None)
    niwaki.load(model, "cpu")
    assert not caplog.text
    niwaki.load(packed, "cpu")
    assert "packed weights are computed with by pure torch" in caplog.text


def test_a_model_that_reads_weights_of_its_layers(tmp_path: Path) -> None:
    """Jamba multiplies with that of a linear layer itself."""
    sizes: dict[str, Any] = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}
    sizes |= {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8}
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(JambaConfig(**sizes))
    with torch.no_grad():
        for module in dense.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.masked_fill_(torch.rand(module.weight.shape) < 0.7, 0.0)
    dense.save_pretrained(tmp_path / "model")
    niwaki.pack(tmp_path / "model", tmp_path / "packed")
    models: list[Any] = [reference(tmp_path / "model"), niwaki.load(tmp_path / "packed", "cpu")]
    assert isinstance(models[1].get_submodule("model.layers.0.mamba.dt_proj"), SparseLinear)
    one, other = (each.generate(random_tokens(1, 5), max_new_tokens=10, do_sample=False) for each in models)
    assert torch.equal(one, other)


def pruned(tmp_path: Path, pattern: float, **changes: Any) -> Path:
    model, options = save_model_with_tokenizer(tmp_path / "dense"), {"solver": "magnitude", "effort": "fast", **changes}
    texts: dict[str, Any] = {"calibration": Calibration("demo", samples=4, length=32), "measurement": None}
    niwaki.prune(model, tmp_path / "pruned", pattern, compute="cpu", **texts, **options)
    return tmp_path / "pruned"


@pytest.mark.slow
def test_perplexity_of_a_packed_model(tmp_path: Path) -> None:
    """Whatever reads a model reads a packed one."""
    niwaki.pack(pruned(tmp_path, 0.8), tmp_path / "packed")
    measured = Measurement("demo-held", length=32, samples=3)
    one, other = (evaluate(tmp_path / name, measured, compute="cpu").value for name in ("pruned", "packed"))
    assert one == other


@pytest.mark.parametrize(("grid", "bits"), [("int8", 8), ("int4", 4), ("int3", 4), ("int4:16", 0)])
@pytest.mark.slow
def test_weights_on_a_grid(grid: str, bits: int, tmp_path: Path) -> None:
    model, progress = pruned(tmp_path, 0.5, quantize=grid), StopAt(1000)
    there_and_back(model, progress)
    said = [text for text in progress.notes if "groups of 16 cannot be packed as whole numbers" in text]
    assert len(said) == (grid == "int4:16")
    stored = Index.read(tmp_path / "packed").tensors
    # Groups of 16 do not fill words of the mask, so that these stay as they are.
    assert {tensor.bits for tensor in stored.values() if tensor.packed} == {bits}
    assert any(tensor.groups for tensor in stored.values()) == bool(bits)
    assert (tmp_path / "packed" / SCALES).exists()
    tokens = random_tokens(1, 5)
    with torch.no_grad():
        found = niwaki.load(tmp_path / "packed", "cpu")(tokens).logits
        assert torch.allclose(found, reference(model)(tokens).logits, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "mixtral", "gpt_oss"])
@pytest.mark.slow
def test_all_weights_on_a_grid_are_whole_numbers(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In half precision too, and experts in one tensor or in several."""
    model = model_on_a_grid(tmp_path / "model", case, dtype)
    niwaki.pack(model, tmp_path / "packed")
    expected, found = load_file(model / "model.safetensors"), as_documented(tmp_path / "packed")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    stored = Index.read(tmp_path / "packed").tensors
    assert {key for key in stored if stored[key].groups} == {
        key for key in expected if is_pruned(case, key) and expected[key].ndim > 1
    }
    read = read_all(tmp_path / "packed")
    assert all(torch.equal(read[key], expected[key]) for key in expected)


def test_weights_that_left_their_grid(tmp_path: Path) -> None:
    """One was changed since, or has no scales: these matrices keep their values, to the bit."""
    model = model_on_a_grid(tmp_path / "model", "llama", torch.float32)
    scales = load_file(model / SCALES)
    changed, negative, alone, *others = sorted(key.removesuffix("_scale") for key in scales)
    del scales[f"{alone}_scale"]
    save_file(scales, model / SCALES)
    with edited(model) as tensors:
        tensors[changed].view(-1)[3] += 1e-5
        tensors[negative][tensors[negative] == 0] = -0.0
    there_and_back(model)
    stored = Index.read(tmp_path / "packed").tensors
    assert [key for key in stored if stored[key].groups] == others
    assert stored[changed].packed
    assert stored[alone].packed


def test_negative_zeros_are_counted(model: Path, tmp_path: Path) -> None:
    assert niwaki.pack(model, tmp_path / "packed").negative_zeros == 0
    with edited(model) as tensors:
        zeros = next(value.view(-1) for key, value in tensors.items() if is_pruned("llama", key))
        zeros[(zeros == 0).nonzero()[:5]] = -0.0
    assert niwaki.pack(model, tmp_path / "again").negative_zeros == 5


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
@pytest.mark.slow
def test_what_a_loaded_model_saves_is_the_dense_one(case: str, tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model", case)
    niwaki.pack(model, tmp_path / "packed")
    niwaki.load(tmp_path / "packed", "cpu").save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(reference(tmp_path / "saved")(tokens).logits, reference(model)(tokens).logits)


def test_a_loaded_model_takes_its_own_state_only(model: Path, packed: Path) -> None:
    """Packed weights are constants."""
    loaded = niwaki.load(packed, "cpu")
    assert loaded.load_state_dict(reference(model).state_dict()) is not None
    state = loaded.state_dict()
    key = next(key for key in state if is_pruned("llama", key))
    with pytest.raises(RuntimeError, match=f"{re.escape(key)} has others"):
        loaded.load_state_dict({**state, key: state[key] + 1})
    with pytest.raises(RuntimeError, match=f'Missing key.*"{re.escape(key)}"'):
        loaded.load_state_dict({name: value for name, value in state.items() if name != key})


@pytest.mark.parametrize(
    ("dtype", "stored", "computed"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float16, torch.float32),
        ("auto", torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.slow
def test_what_is_computed_in(
    dtype: str | torch.dtype, stored: torch.dtype, computed: torch.dtype, tmp_path: Path
) -> None:
    """In bfloat16 long texts give nearly what they give in float32, and short ones too."""
    model = sparse_model(tmp_path / "model", dtype=stored)
    niwaki.pack(model, tmp_path / "packed")
    tokens = random_tokens(2, 40)
    expected = reference(model, torch.float32)(tokens).logits
    for path in (model, tmp_path / "packed"):
        loaded = niwaki.load(path, "cpu", dtype)
        assert loaded.dtype == computed
        for some in (tokens, tokens[:, :3]):
            off = loaded(some).logits - expected[:, : some.shape[1]]
            assert off.norm() < (0.03 if computed == torch.bfloat16 else 1e-5) * expected.norm()


class TestTheCard:
    """It says how to load the model, unlike the dense one's, which comes back."""

    def of(self, model: Path) -> str:
        there_and_back(model)
        return (model.parent / "packed" / "README.md").read_text(encoding="utf-8")

    def test_of_the_dense_model(self, model: Path, tmp_path: Path) -> None:
        text = "---\nlicense: mit\nlibrary_name: transformers\ntags: [a]\n---\n# Loads everywhere é\n"
        (model / "README.md").write_text(text, encoding="utf-8")
        others = {"report.html", "niwaki-bench.json"}
        for name in others:
            (model / name).touch()
        (tmp_path / "first").mkdir()
        niwaki.pack(model, tmp_path / "first")
        assert not others & {path.name for path in (tmp_path / "first").iterdir()}
        for name in others:
            (model / name).unlink()
        card = self.of(model)
        top = yaml.safe_load(card.split("---")[1])
        assert top == {"license": "mit", "library_name": "niwaki", "tags": ["a", "niwaki", "packed"]}
        assert "Loads everywhere" not in card
        assert "niwaki.load(" in card
        assert "(README.dense.md)" in card
        assert (tmp_path / "packed" / "README.dense.md").read_text(encoding="utf-8") == text

    @pytest.mark.parametrize(
        "base",
        [None, b"\xff no text", b"---\n[\n---\n", b"---\ntags: 5\n---\n", b"---\na: " + 3_000 * b"[" + b"\n---\n"],
        ids=["none", "no text", "no YAML", "odd tags", "deep"],
    )
    @pytest.mark.slow
    def test_whatever_that_is_like(self, base: bytes | None, model: Path) -> None:
        if base is not None:
            (model / "README.md").write_bytes(base)
        assert ("README.dense.md" in self.of(model)) == (base is not None)

    def test_a_tag_that_is_no_list(self, model: Path) -> None:
        (model / "README.md").write_text("---\ntags: prune\n---\n")
        assert yaml.safe_load(self.of(model).split("---")[1])["tags"] == ["niwaki", "packed", "prune"]

    def test_a_folder_of_its_name(self, model: Path) -> None:
        (model / "README.md").mkdir()
        (model / "README.md" / "text").write_text("a")
        there_and_back(model)

    def test_of_a_model_that_was_packed_without_one(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its README.md is the dense model's."""
        (model / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
        monkeypatch.setattr("niwaki.packed.pack.write_card_of_form", lambda *_: None)
        assert "# A model" in self.of(model)

    @pytest.mark.parametrize("name", [".", "../model"])
    def test_the_name(self, name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(model)
        niwaki.pack(name, tmp_path / "packed")
        assert "\n# model, packed\n" in (tmp_path / "packed" / "README.md").read_text()

    def test_the_name_of_one_from_the_hub(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The folder of the cache is called by a commit."""
        monkeypatch.setattr("niwaki.packed.pack.locate_model", lambda _: model)
        niwaki.pack("somebody/little", tmp_path / "packed")
        assert "\n# little, packed\n" in (tmp_path / "packed" / "README.md").read_text()

    def test_a_file_in_its_place(self, model: Path, tmp_path: Path) -> None:
        (model / "README.dense.md").touch()
        assert "README.dense.md" in message(lambda: niwaki.pack(model, tmp_path / "out"))
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_float8_stays_as_it_is(model: Path) -> None:
    """There are no kernels for it."""
    with edited(model) as tensors:
        key = next(key for key in tensors if is_pruned("llama", key))
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    there_and_back(model)
    assert not Index.read(model.parent / "packed").tensors[key].packed


@pytest.mark.parametrize("what", ["pack", "unpack"])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.slow
def test_stopped_while_it_was_moved(
    what: str, there: bool, model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a folder that is in its place already; the same command ends it."""
    (model / "sub").mkdir()
    (model / "sub" / "a.txt").write_text("a")
    niwaki.pack(model, tmp_path / "packed")
    source = model if what == "pack" else tmp_path / "packed"
    expected = tmp_path / ("packed" if what == "pack" else "model")
    if there:
        out.mkdir()

    def stop(place: Workplace) -> None:
        if there:
            (place.directory / "sub").rename(out / "sub")
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if it had been killed
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workplace, "move", stop)
        with pytest.raises(KeyboardInterrupt):
            getattr(niwaki, what)(source, out)
    getattr(niwaki, what)(source, out)
    assert same_files(out, expected)


def test_stopped_while_its_journal_was_written(model: Path, out: Path) -> None:
    (out / ".partial").mkdir(parents=True)
    (out / ".partial.jsonabcd").touch()
    niwaki.pack(model, out)
    assert "packed.json" in {path.name for path in out.iterdir()}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("error", "said"),
    [(errno.ENOSPC, "no space left on disk for"), (errno.EROFS, "cannot write .*: Read-only file system")],
)
def test_what_cannot_be_written(error: int, said: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of it."""

    def full(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("niwaki.checkpoints.writing.reserve", full)
    assert re.search(said, message(lambda: niwaki.pack(model, out), OutputError))
    assert not out.exists()


class TestRefusals:
    def test_dense(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """At once: no matrix is packed to see that it would not be smaller."""
        model = save_model(tmp_path / "model")
        monkeypatch.setattr("niwaki.packed.pack.pack_matrix", lambda *_: pytest.fail("it is packed"))
        assert "prune or quantize it first" in message(lambda: niwaki.pack(model, tmp_path / "out"))
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert "not packed" in message(lambda: niwaki.unpack(model, tmp_path / "out"))

    def test_hardly_pruned(self, tmp_path: Path) -> None:
        """The values alone would be smaller, with their mask they are not."""
        model = sparse_model(tmp_path / "model", sparsity=0.07)
        assert "prune or quantize it first" in message(lambda: niwaki.pack(model, tmp_path / "out"))

    def test_packed_where_dense_is_wanted(self, packed: Path, out: Path) -> None:
        assert "packed already" in message(lambda: niwaki.pack(packed, out))
        assert "niwaki unpack" in message(lambda: niwaki.prune(packed, out, calibration="demo"), CheckpointError)

    def test_other_libraries(self, packed: Path) -> None:
        """They find no weights that they know, and not random ones."""
        with pytest.raises(OSError, match=r"model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(packed)
        config = json.loads((packed / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "niwaki-packed"

    def test_bytes_between_tensors(self, model: Path, out: Path) -> None:
        file = model / "model.safetensors"
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][0])
        header[last]["data_offsets"] = [n + 4 for n in header[last]["data_offsets"]]
        text = json.dumps(header).encode()
        end = len(data) - 8 - size - (header[last]["data_offsets"][1] - header[last]["data_offsets"][0])
        body = data[8 + size :]
        file.write_bytes(len(text).to_bytes(8, "little") + text + body[:end] + b"gap." + body[end:])
        assert "invalid offset for tensor" in message(lambda: niwaki.pack(model, out), CheckpointError)

    @pytest.mark.parametrize("version", [6, 8])
    def test_other_version(self, packed: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        index = Index.read(packed)
        with monkeypatch.context() as patched:
            patched.setattr("niwaki.packed.format.VERSION", version)
            (packed / "packed.json").write_text(index.to_json())
        said = message(lambda: niwaki.load(packed), CheckpointError)
        assert f"version {version} of the format and this niwaki reads 7; install" in said

    def test_names_that_two_tensors_would_have(self, model: Path, out: Path) -> None:
        with edited(model) as tensors:
            key = next(key for key in tensors if is_pruned("llama", key))
            tensors[f"{key}.mask"] = torch.ones(3)
        assert f"{key}.mask" in message(lambda: niwaki.pack(model, out), UnsupportedModelError)

    def test_a_tensor_in_two_files(self, tmp_path: Path) -> None:
        first, second, *_ = sorted(sparse_model(tmp_path / "model", shards=True).glob("*.safetensors"))
        key, value = next(iter(load_file(first).items()))
        save_file({**load_file(second), key: value}, second, {"format": "pt"})
        said = message(lambda: niwaki.pack(tmp_path / "model", tmp_path / "out"), CheckpointError)
        assert f"has the tensor {key!r} twice, in {first.name} and in {second.name}" in said

    def test_another_config(self, packed: Path) -> None:
        """The model is made from it."""
        edit_json(packed / "config.json", rms_norm_eps=1.0)
        assert "config.json" in message(lambda: niwaki.load(packed), CheckpointError)

    def test_missing_index(self, packed: Path, out: Path) -> None:
        (packed / "packed.json").unlink()
        for work in (lambda: niwaki.load(packed), lambda: niwaki.unpack(packed, out)):
            assert "without its packed.json" in message(work, CheckpointError)

    def test_dense_files_of_such_names(self, model: Path) -> None:
        """An index may call them anything."""
        file = (model / "model.safetensors").rename(model / "packed-1.safetensors")
        names = dict.fromkeys(load_file(file), file.name)
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        assert niwaki.load(model, "cpu").num_parameters() > 0

    def test_no_name(self) -> None:
        assert "empty" in message(lambda: niwaki.load(""))

    def test_missing_file(self, packed: Path) -> None:
        (packed / "packed-00001-of-00001.safetensors").unlink()
        assert "lacks the file" in message(lambda: niwaki.load(packed), CheckpointError)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model, that tests damage copies of."""
    path = tmp_path_factory.mktemp("whole")
    niwaki.pack(sparse_model(path / "model", "llama grouped"), path / "packed")
    return path


@pytest.fixture(scope="module")
def gridded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a model on a grid."""
    path = tmp_path_factory.mktemp("gridded")
    niwaki.pack(model_on_a_grid(path / "model", "llama", torch.float32), path / "packed")
    return path


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = PackedCheckpoint(directory)
    return {key: checkpoint.read(key) for key in checkpoint.entries}


def copied(whole: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the packed model, and its index."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    directory = shutil.copytree(whole / "packed", tmp_path / "copy")
    return directory, json.loads((directory / "packed.json").read_text())


def same_tensors(found: dict[str, torch.Tensor], whole: Path) -> bool:
    expected = load_file(whole / "model" / "model.safetensors")
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.slow
def test_a_damaged_byte_is_an_error_or_changes_nothing(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    directory, _ = copied(whole, tmp_path)
    file = directory / data.draw(st.sampled_from(["packed.json", "packed-00001-of-00001.safetensors"]))
    raw = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "set", "cut", "grow", "zero"]))
    # As often in the header, which is small, as in the numbers.
    place = data.draw(st.integers(0, len(raw) - 1) | st.integers(0, min(4000, len(raw) - 1)))
    if kind == "flip":
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "set":
        raw[place] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del raw[place:]
    elif kind == "grow":
        raw[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    else:
        raw[place : place + 64] = bytes(len(raw[place : place + 64]))
    file.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        assert same_tensors(read_all(directory), whole)


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("../x.safetensors"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_index_that_nobody_damaged_can_be_wrong(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Anybody can write a digest: what is wrong then is an error too."""
    directory, values = copied(whole, tmp_path)
    del values["sha256"]
    place: Any = values
    for _ in range(data.draw(st.integers(0, 3))):
        inside = [
            place[key]
            for key in (sorted(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], dict | list) and place[key]
        ]
        if inside:
            place = data.draw(st.sampled_from(inside))
    key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(ANYTHING)
    write_index(directory, values)
    with contextlib.suppress(CheckpointError, OutputError):
        niwaki.unpack(directory, tmp_path / "out")
        assert same_tensors(load_file(tmp_path / "out" / "model.safetensors"), whole)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "config.json", "a\0.safetensors", f"{'a' * 300}.safetensors"]
)
@pytest.mark.parametrize("kind", ["shards", "tensors"])
def test_the_index_cannot_name_other_files(kind: str, name: str, whole: Path, tmp_path: Path) -> None:
    """To read or to write."""
    directory, values = copied(whole, tmp_path)
    for named in values["shards"] if kind == "shards" else values["tensors"].values():
        named["name" if kind == "shards" else "file"] = name
    write_index(directory, values)
    assert "cannot be one of weights" in message(lambda: PackedCheckpoint(directory), CheckpointError)


def test_no_byte_of_the_index_is_left_out(whole: Path, tmp_path: Path) -> None:
    """Its digest is of all that it says, also what only ``unpack`` needs."""
    directory, values = copied(whole, tmp_path)
    text = (directory / "packed.json").read_text()
    shard, stored = values["shards"][0], next(iter(values["tensors"].values()))
    for old in (values["about"], values["config"], shard["header"], shard["sha256"], stored["sha256"]):
        inside = json.dumps(old)
        (directory / "packed.json").write_text(text.replace(inside, '"!' + inside[1:], 1))
        assert "not what was written" in message(lambda: Index.read(directory), CheckpointError)


def test_another_digest_of_a_file(whole: Path, tmp_path: Path) -> None:
    directory, values = copied(whole, tmp_path)
    values["shards"][0]["sha256"] = "0" * 64
    write_index(directory, values)
    said = message(lambda: niwaki.unpack(directory, tmp_path / "out"), OutputError)
    assert "is not what it was before packing; was the disk full, or the packed model changed?" in said


def test_what_an_index_cannot_say(whole: Path, tmp_path: Path) -> None:
    """With the right digest."""
    directory, values = copied(whole, tmp_path)
    tensors = values["tensors"]
    packed = next(key for key in tensors if tensors[key]["packed"] and len({*tensors[key]["shape"]}) == 2)
    plain = next(key for key in tensors if not tensors[key]["packed"] and len(tensors[key]["shape"]) == 2)

    def said(key: str, **changes: object) -> str:
        return refused(tensors={**tensors, key: {**tensors[key], **changes}})

    def refused(**changes: object) -> str:
        write_index(directory, {**values, **changes})
        return message(lambda: PackedCheckpoint(directory), CheckpointError)

    for number in (-1, 2**48, True, 1.0):
        assert "Expected `int`" in said(packed, count=number)
    for key in (packed, plain):
        assert "does not have" in said(key, shape=tensors[key]["shape"][::-1])
    assert "should be there" in said(packed, count=tensors[packed]["count"] + 1)
    (shard,) = values["shards"]
    assert "do not have its tensors" in refused(shards=[{**shard, "keys": [*shard["keys"], packed]}])
    for version in ("7", True, 1.0, None):
        assert f"has version {version!r} of the format" in refused(version=version)
    for name in ("../../x", "../x.safetensors", 5):
        index = json.dumps({"weight_map": {packed: name}})
        assert "index.json names a shard outside its directory" in refused(index=index)
    half = "half of a surrogate pair: \ud800"
    for changed in ({"index": half}, {"shards": [{**shard, "header": half}]}, {"shards": [{**shard, "name": half}]}):
        assert "surrogates not allowed" in refused(**changed)


@pytest.mark.parametrize("dtype", ["I8", "U8", "BOOL", "I16", "I32", "I64", "F64", "F8_E4M3", "F8_E5M2"])
def test_values_that_no_kernel_knows(dtype: str, whole: Path, tmp_path: Path) -> None:
    """All else fits: the file has them in this dtype, and as many as the mask has ones."""

    def change(index: dict[str, Any], tensors: dict[str, Raw], key: str) -> None:
        index["tensors"][key]["dtype"] = dtype
        count = index["tensors"][key]["count"] + PADDING
        tensors[f"{key}.values"] = dtype, (count,), bytes(count * SIZES[dtype])
        header = json.loads(index["shards"][0]["header"])
        header[key]["dtype"] = dtype
        index["shards"][0]["header"] = json.dumps(header)

    directory = forged(whole / "packed", tmp_path / "copy", change)
    assert "cannot be packed" in message(lambda: niwaki.load(directory, "cpu"), CheckpointError)


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf, 3e38, -3e38, 3e36])
@pytest.mark.slow
def test_forged_scales(scale: float, gridded: Path, tmp_path: Path) -> None:
    """They never make anything that is not finite. 3e36 does if its whole numbers are large."""
    directory = forged(gridded / "packed", tmp_path / "copy", scaled(scale))
    said = message(lambda: niwaki.load(directory, "cpu"), CheckpointError)
    assert re.search("is 0 or not|NaN or infinite|infinite values", said)


def test_what_readers_of_json_differ_about(whole: Path, tmp_path: Path) -> None:
    directory, _ = copied(whole, tmp_path)
    text = (directory / "packed.json").read_text()
    for changed, said in (
        (text.replace('"groups"', '"groups": 0, "groups"', 1), "a key twice"),
        ("\ufeff" + text, "BOM"),
        ("[" * 100_000, "recursion"),
        (text.replace('"version": 7', f'"version": {"9" * 5000}'), "digits"),
    ):
        (directory / "packed.json").write_text(changed)
        assert said in message(lambda: PackedCheckpoint(directory), CheckpointError)


@pytest.mark.parametrize("what", ["exchanged", "dtype", "another", "metadata", "twice", "name"])
def test_the_dense_header_cannot_lie(what: str, whole: Path, tmp_path: Path) -> None:
    """Else ``unpack`` would write another model than ``load`` reads, or one that no reader finds."""

    def change(index: dict[str, Any], _: dict[str, Raw], key: str) -> None:
        shard = index["shards"][0]
        header = json.loads(shard["header"])
        other = next(k for k, each in header.items() if k != key and each.get("shape") == header[key]["shape"])
        if what == "exchanged":
            header[key], header[other] = header[other], header[key]
        elif what == "dtype":
            header[key]["dtype"] = "I32"
        elif what == "another":
            header["another"] = header[key]
        elif what == "metadata":
            header["__metadata__"] = {"format": 1}
        elif what == "name":
            shard["name"] = "other.safetensors"
        else:
            index["shards"].append({**shard, "keys": [], "header": "{}"})
        shard["header"] = json.dumps(header)

    directory = forged(whole / "packed", tmp_path / "copy", change)
    said = message(lambda: niwaki.unpack(directory, tmp_path / "out"), CheckpointError)
    assert what != "name" or "not of a whole model" in said
    assert not (tmp_path / "out").exists()


def test_rows_that_are_not_outputs(whole: Path, tmp_path: Path) -> None:
    """A square matrix that is said to be packed the other way around is the same model to all."""

    def change(index: dict[str, Any], *_: object) -> None:
        stored = next(s for s in index["tensors"].values() if s["packed"] and s["shape"][0] == s["shape"][1])
        stored["transposed"] = True

    directory = forged(whole / "packed", tmp_path / "copy", change)
    niwaki.unpack(directory, tmp_path / "out")
    tokens = random_tokens(1, 3)
    with torch.no_grad():
        expected = reference(tmp_path / "out")(tokens).logits
        assert torch.allclose(niwaki.load(directory, "cpu")(tokens).logits, expected, atol=1e-4)


@pytest.mark.parametrize("what", ["pack", "unpack"])
def test_where_nothing_is_written(what: str, whole: Path, tmp_path: Path) -> None:
    source = whole / ("model" if what == "pack" else "packed")
    before = sorted(whole.rglob("*"))
    for out, said in (
        (source, "is not an empty directory"),
        (whole / "model", "is not an empty directory"),
        (whole, "is not an empty directory"),
        (source / "config.json", "is not an empty directory"),
        (source / "in" / "side", "inside the model's own directory"),
    ):
        assert said in message(lambda out=out: getattr(niwaki, what)(source, out))  # type: ignore[misc]
    assert sorted(whole.rglob("*")) == before


def test_double_precision_has_no_kernels(tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model", dtype=torch.float64)
    said = message(lambda: niwaki.pack(model, tmp_path / "out"), UnsupportedModelError)
    assert said.endswith("are in F64; only BF16, F16 and F32 can be packed")


@pytest.mark.parametrize("odd", [{"quantization": 5}, {"quantization": "int9"}, {"blocks": "0:1"}])
@pytest.mark.parametrize("what", [niwaki.pack, niwaki.export])
def test_what_no_run_writes_about_a_grid(
    what: Callable[..., object], odd: dict[str, object], model: Path, out: Path
) -> None:
    edit_json(model / "config.json", pruning_config={"library": "niwaki", **odd})
    assert "pruning_config: " in message(lambda: what(model, out), CheckpointError)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda scales: scales * torch.nan, lambda scales: scales * torch.inf, lambda scales: scales * 0),
        *(lambda scales: scales[:-1], lambda scales: scales[:, 0], lambda scales: scales.expand(-1, 2).contiguous()),
        *(lambda scales: scales.double(), lambda scales: scales.int(), lambda scales: scales[0, 0]),
    ],
)
@pytest.mark.parametrize("what", [niwaki.pack, niwaki.export])
@pytest.mark.slow
def test_scales_beside_the_model_that_no_run_writes(
    what: Callable[..., object], change: Callable[[torch.Tensor], torch.Tensor], gridded: Path, tmp_path: Path
) -> None:
    model, out = shutil.copytree(gridded / "model", tmp_path / "model"), tmp_path / "out"
    scales = load_file(model / SCALES)
    key = max(scales)
    save_file({**scales, key: change(scales[key]).clone()}, model / SCALES)
    assert repr(key) in message(lambda: what(model, out), CheckpointError)
    assert not out.exists()
