"""GGUF files as models: read by transformers once, and pruned as the directory that they were made from."""

from __future__ import annotations

import errno
import functools
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import cached_assets_path
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import niwaki
from niwaki.checkpoints.reading import ORIGIN, SINGLE_NAME
from niwaki.errors import CheckpointError, UnsupportedModelError, UsageError
from niwaki.models import gguf as gguf_models
from niwaki.models.gguf import follow_keys
from niwaki.models.locate import locate_model
from niwaki.records.wording import size
from support.command import Command, niwaki_  # noqa: F401 - a fixture
from support.gguf_files import changed, header, tensor
from support.models import (
    FEW_TOKENS,
    add_small_tokenizer,
    edit_json,
    format_of,
    message,
    random_model,
    random_tokens,
    save_model,
)
from support.runs import StopAt, files, raw, tensors

gguf: Any = pytest.importorskip("gguf")
TYPES: Any = gguf.GGUFValueType

TOKENS = random_tokens(8, 24)
#: Its zeros and weights depend on weights alone: the file has norms' epsilon and more in float32.
PLAIN: dict[str, Any] = {"solver": "magnitude", "calibration": TOKENS, "measurement": None}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setattr("niwaki.files.cached_assets_path", functools.partial(cached_assets_path, assets_dir=place))
    return place


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A model's directory, and the file that it makes."""
    source, file = exported(tmp_path_factory.mktemp("small"))
    return source, file.read_bytes()


@pytest.fixture
def file(small: tuple[Path, bytes], tmp_path: Path) -> Path:
    """That file."""
    (tmp_path / "model.gguf").write_bytes(small[1])
    return tmp_path / "model.gguf"


def exported(path: Path, case: str = "llama", kind: Any = "F16", **changes: Any) -> tuple[Path, Path]:
    """(a random model's directory, in float16; the file that it makes)."""
    source, file = path / "source", path / "model.gguf"
    random_model(case, vocab_size=FEW_TOKENS, dtype=torch.float16, **changes).save_pretrained(source)
    niwaki.export(add_small_tokenizer(source), file, format_of(kind))
    return source, file


def logits(path: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    with torch.no_grad():
        values: Tensor = model(TOKENS).logits
    return values


@pytest.mark.parametrize("case", ["llama grouped", "llama tied", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.slow
def test_pruned_as_the_directory_it_was_made_from(tmp_path: Path, case: str) -> None:
    source, file = exported(tmp_path, case)
    niwaki.prune(source, tmp_path / "expected", 0.5, **PLAIN)
    record = niwaki.prune(file, tmp_path / "out", 0.5, **PLAIN)
    expected, out = tensors(tmp_path / "expected"), tensors(tmp_path / "out")
    assert expected.keys() == out.keys()
    for key, value in expected.items():
        assert value.dtype == out[key].dtype == torch.float16
        assert raw(value) == raw(out[key]), key
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "expected"), atol=1e-4, rtol=1e-4)
    assert any("the GGUF file model.gguf (SHA-256 " in note and "in float16" in note for note in record.notes)
    assert "the GGUF file model.gguf" in (tmp_path / "out" / "README.md").read_text().replace("\\", "")
    assert not (tmp_path / "out" / ORIGIN).exists()
    text = "The old man sat by the river."
    ours, theirs = (AutoTokenizer.from_pretrained(path)(text).input_ids for path in (source, tmp_path / "out"))
    assert ours == theirs


@pytest.mark.slow
def test_eight_bits_are_those_of_the_package(tmp_path: Path) -> None:
    source, file = exported(tmp_path, "qwen2", "Q8_0", hidden_size=64, intermediate_size=96)
    directory = locate_model(str(file))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}["blk.1.ffn_up.weight"]
    meant = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))
    read = load_file(directory / SINGLE_NAME)["model.layers.1.mlp.up_proj.weight"]
    assert read.dtype == torch.bfloat16
    assert raw(read) == raw(meant.bfloat16())
    original = load_file(source / SINGLE_NAME)["model.layers.1.mlp.up_proj.weight"].float()
    within = original.unflatten(1, (-1, 32)).abs().amax(2) * (0.51 / 127 + 2**-8)
    assert ((read.float() - original).unflatten(1, (-1, 32)).abs().amax(2) <= within).all()
    dense = logits(source)
    assert (logits(directory) - dense).norm() < 0.05 * dense.norm()
    for path in (source, file):
        niwaki.prune(path, tmp_path / f"{path.suffix}out", 0.5, **PLAIN)
    expected, out = tensors(tmp_path / "out"), tensors(tmp_path / ".ggufout")
    for key, value in expected.items():  # equally large weights of eight bits change places
        assert ((value == 0) == (out[key] == 0)).float().mean() > 0.98, key


def test_other_commands_and_places(tmp_path: Path, small: tuple[Path, bytes], file: Path) -> None:
    source = shutil.copytree(small[0], tmp_path / "source")
    (tmp_path / "alone").mkdir()
    file.rename(tmp_path / "alone" / "model.gguf")
    alone = tmp_path / "alone"
    measured = niwaki.evaluate(alone, TOKENS)
    assert measured.value == pytest.approx(niwaki.evaluate(source, TOKENS).value, rel=1e-4)
    assert [*map(str, niwaki.inspect(alone))] == [*map(str, niwaki.inspect(source))]
    assert sorted(path.name for path in alone.iterdir()) == ["model.gguf"]
    (alone / "other.gguf").touch()
    assert "several GGUF files, such as model.gguf and other.gguf" in message(lambda: locate_model(str(alone)))
    (source / "model.gguf").touch()  # beside safetensors, which count
    assert locate_model(str(source)) == source


def test_what_types_a_file_has(tmp_path: Path, niwaki_: Command) -> None:  # noqa: F811
    """All bytes of its tensors, by the package's reader, and the bits of a weight with its part of the scale."""
    _, file = exported(tmp_path, kind="Q8_0", hidden_size=64, intermediate_size=96)
    tensors = gguf.GGUFReader(file).tensors
    rows = [line.split() for line in niwaki_("inspect", file).out.splitlines()]
    total = next(row for row in rows if row[:1] == [str(len(tensors))])
    taken, weights = sum(int(each.n_bytes) for each in tensors), sum(int(each.n_elements) for each in tensors)
    assert total == [str(len(tensors)), f"{weights:,}", *size(taken).split(), f"{8 * taken / weights:.2f}"]
    of_type = next(row for row in rows if row[:1] == ["Q8_0"])
    assert of_type[1] == str(sum(each.tensor_type.name == "Q8_0" for each in tensors))
    assert of_type[-1] == "8.50"
    assert next(row for row in rows if row[:2] == ["blk.*.attn_norm", "F32"])[-1] == "32.00"
    assert ["zeros,", "%"] in rows  # and then what the commands would change


def test_files_of_no_tensors_and_odd_names(tmp_path: Path, niwaki_: Command) -> None:  # noqa: F811
    """Files of a vocabulary alone; and names that would be marks of style on the screen."""
    (tmp_path / "vocabulary.gguf").write_bytes(header([], []))
    found = niwaki_("inspect", tmp_path / "vocabulary.gguf")
    assert (found.code, "bits a weight" in found.out) == (1, True)
    (tmp_path / "odd.gguf").write_bytes(header([], [tensor("blk.0.[/red]x.weight")]) + bytes(64))
    assert "blk.*.[/red]x" in niwaki_("inspect", tmp_path / "odd.gguf").out
    model = save_model(tmp_path / "model.gguf")
    assert niwaki_("inspect", model).code == 0


def test_tokens_are_read_once(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's reader, which transformers calls each time, makes objects of each token: a minute for Gemma's."""
    read, of_package = list[int](), gguf.GGUFReader.__init__

    def reader(self: Any, *given: Any) -> None:
        of_package(self, *given)
        read.append(sum(len(field.data) for key, field in self.fields.items() if key.startswith("tokenizer.")))

    monkeypatch.setattr(gguf.GGUFReader, "__init__", reader)
    summaries = [*map(str, niwaki.inspect(file))]
    assert read
    assert max(read) < FEW_TOKENS
    (made,) = cache.rglob(SINGLE_NAME)
    assert not [*made.parent.glob("tokenizer*")]  # which looking at weights needs none of
    changed = made.stat().st_mtime_ns
    assert locate_model(str(file)) == made.parent
    assert made.stat().st_mtime_ns == changed
    after = files(made.parent)
    assert {"tokenizer.json", ORIGIN} <= {path.name for path in made.parent.iterdir()}
    assert [*map(str, niwaki.inspect(file))] == summaries
    shutil.rmtree(cache)
    assert files(locate_model(str(file))) == after


@pytest.mark.slow
def test_the_same_bytes_again(tmp_path: Path, cache: Path, file: Path) -> None:
    first = locate_model(str(file))
    assert locate_model(str(file)) == first
    assert json.loads((first / ORIGIN).read_text())["file"] == "model.gguf"
    before = files(first)
    cache.rename(tmp_path / "elsewhere")
    assert files(locate_model(str(file))) == before
    renamed = file.rename(tmp_path / "renamed.gguf")
    assert json.loads((locate_model(str(renamed)) / ORIGIN).read_text())["file"] == "renamed.gguf"


@pytest.mark.slow
def test_a_stopped_run_resumes_without_the_cache(tmp_path: Path, cache: Path, file: Path) -> None:
    options: dict[str, Any] = {"solver": "wanda", "calibration": TOKENS, "measurement": None}
    niwaki.prune(file, tmp_path / "whole", 0.5, **options)
    with pytest.raises(KeyboardInterrupt):
        niwaki.prune(file, tmp_path / "out", 0.5, progress=StopAt(10), **options)
    cache.rename(tmp_path / "elsewhere")
    assert niwaki.prune(file, tmp_path / "out", 0.5, **options).resumed == [1]
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_stopped_conversion_leaves_nothing(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_models, "replace_file", interrupted)  # after the weights
        with pytest.raises(KeyboardInterrupt):
            locate_model(str(file))
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert (locate_model(str(file)) / SINGLE_NAME).exists()


@pytest.mark.parametrize("size", [0, 3, 40, 3000, -1])
def test_damaged_files(cache: Path, file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file} cannot be read as GGUF" in message(lambda: locate_model(str(file)), CheckpointError)
    assert not [path for path in cache.rglob("*") if path.is_file()]


LACKS = "lacks the tensor that transformers calls 'model.layers.1.mlp.up_proj.weight', which"


def given(key: str, value: Any, kind: str) -> Callable[[Any, Any], None]:
    """A change of a file's fields."""
    return lambda fields, _: fields.update({key: (value, [TYPES[kind]])})


def refused(file: Path, error: Any = CheckpointError) -> str:
    """What is said of a file, behind its name."""
    said = message(lambda: locate_model(str(file)), error)
    assert said.startswith(str(file))
    return said.removeprefix(str(file)).lstrip()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (given("general.architecture", "mamba2", "STRING"), CheckpointError, "mamba2"),
        (given("split.count", 3, "UINT16"), UnsupportedModelError, "one of 3 files"),
        (given("llama.rope.scaling.type", "yarn", "STRING"), UnsupportedModelError, "rotary positions (yarn)"),
        (given("general.type", "mmproj", "STRING"), CheckpointError, "'mmproj'"),
        (lambda _, kept: kept.pop("blk.1.ffn_up.weight"), CheckpointError, LACKS),
        (
            lambda _, kept: kept.update({"blk.0.attn_q.bias": kept["blk.0.attn_norm.weight"]}),
            *(UnsupportedModelError, "makes a model of"),
        ),
        (lambda _, kept: kept["blk.0.ffn_up.weight"].fill(float("nan")), CheckpointError, "NaN or infinite values"),
    ],
)
@pytest.mark.slow
def test_what_would_be_left_out(file: Path, change: Any, error: Any, said: str) -> None:
    changed(file, change)
    answer = refused(file, error)
    assert said in answer
    ends = ("prune the model", "get another file", "join them", "give the file")
    assert said == "mamba2" or answer.rpartition("; ")[2].startswith(ends)  # or what transformers says


def test_no_architecture(file: Path) -> None:
    file.write_bytes(header([], [tensor()]) + bytes(64))
    assert refused(file).startswith("has no field general.architecture, which says what model it is; get another file")


def test_a_file_that_may_not_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr("niwaki.checkpoints.gguf_header.read_header", locked)
    assert refused(file) == "cannot be read: Permission denied"


@pytest.mark.parametrize(
    "stretch",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
    ],
)
@pytest.mark.slow
def test_stretched_positions(tmp_path: Path, stretch: dict[str, Any]) -> None:
    rope = {"rope_theta": 500_000.0, **stretch}
    if rope["rope_type"] == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source, file = exported(tmp_path, head_dim=64, rope_parameters=rope)
    if rope.get("original_max_position_embeddings") == 32:
        assert "stretched rotary positions (rope_freqs.weight)" in refused(file, UnsupportedModelError)
        return
    directory = locate_model(str(file))
    assert AutoConfig.from_pretrained(directory).rope_parameters == rope
    torch.testing.assert_close(logits(directory), logits(source), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_digits_are_split_as_the_file_says(tmp_path: Path) -> None:
    """As SmolLM2's are; all other ways are in test_gguf_source_tokenizer.py."""
    source = tmp_path / "source"
    random_model("llama", vocab_size=FEW_TOKENS).save_pretrained(source)
    steps = [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False}]
    steps[1] |= {"trim_offsets": True, "use_regex": True}
    edit_json(
        add_small_tokenizer(source) / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": steps}
    )
    niwaki.export(source, tmp_path / "model.gguf", "gguf-f16")
    own, ours = (AutoTokenizer.from_pretrained(each) for each in (source, locate_model(str(tmp_path / "model.gguf"))))
    for text in ("a  12345", " 12345", "x\t\t1\n\n 2"):
        assert ours(text).input_ids == own(text).input_ids


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        *(("attention.scale", 0.5, "FLOAT32"), ("attention.sliding_window", 4, "UINT32")),
        *(("rope.dimension_count", 4, "UINT32"), ("attention.value_length", 16, "UINT32")),
        *(("attn_logit_softcapping", 50.0, "FLOAT32"), ("final_logit_softcapping", 30.0, "FLOAT32")),
        *(("expert_weights_scale", 2.5, "FLOAT32"), ("expert_gating_func", 2, "UINT32")),
        *(("logit_scale", 0.0625, "FLOAT32"), ("residual_scale", 0.25, "FLOAT32"), ("attention.causal", False, "BOOL")),
        *(("rope.scaling.attn_factor", 1.25, "FLOAT32"), ("nextn_predict_layers", 1, "UINT32")),
        ("niwaki.unknown", "x", "STRING"),
    ],
)
@pytest.mark.slow
def test_keys_that_would_be_left_out(file: Path, key: str, value: Any, kind: str) -> None:
    changed(file, given(f"llama.{key}", value, kind))
    assert f"has llama.{key} {value!r}, which" in refused(file, UnsupportedModelError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rope.freq_base", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("attention.layer_norm_rms_epsilon", value) for value in (-1e-5, math.nan, math.inf)),
    ],
)
def test_numbers_that_no_model_has(file: Path, key: str, value: float) -> None:
    changed(file, given(f"llama.{key}", value, "FLOAT32"))
    assert refused(file).startswith(f"has llama.{key} {np.float32(value).item()!r}, no number ")


@pytest.mark.parametrize("count", [None, 0, 5])
def test_experts_for_a_token(tmp_path: Path, count: int | None) -> None:
    key = "qwen3moe.expert_used_count"
    _, file = exported(tmp_path, "qwen3_moe")
    changed(file, (lambda fields, _: fields.pop(key)) if count is None else given(key, count, "UINT32"))
    how = f"lacks the field {key}" if count is None else f"has {key} {count}, of qwen3moe.expert_count 4"
    assert refused(file).startswith(f"{how}; get another")


def test_keys_that_change_nothing(small: tuple[Path, bytes], file: Path) -> None:
    neutral: dict[str, dict[str, Any]] = {
        "FLOAT32": {"attention.scale": 8**-0.5, "attn_logit_softcapping": 0.0, "logit_scale": 1.0}
        | {"rope.scaling.factor": 1.0},
        "UINT32": {"attention.sliding_window": 10**6, "expert_count": 0},
        "BOOL": {"attention.causal": True},
        "STRING": {"rope.scaling.type": "none"},
    }
    fields = {f"llama.{key}": (neutral[kind][key], [TYPES[kind]]) for kind in neutral for key in neutral[kind]}
    changed(file, lambda all_, _: all_.update(fields | {"mine.own": ("x", [TYPES.STRING])}))
    torch.testing.assert_close(logits(locate_model(str(file))), logits(small[0]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "key",
    [
        *("attention.layer_norm_rms_epsilon", "attention.head_count", "context_length", "feed_forward_length"),
        *("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"),
    ],
)
@pytest.mark.slow
def test_keys_that_are_missing(file: Path, key: str) -> None:
    name = key if key.startswith("tokenizer") else f"llama.{key}"
    changed(file, lambda fields, _: fields.pop(name))
    said = refused(file)
    assert said.startswith(f"lacks the field {name}")
    assert "; get another file of the model, or prune the model that the file was made from" in said


def test_keys_that_the_configuration_is_made_to_say(file: Path) -> None:
    changed(file, given("llama.rope.scaling.factor", 4.0, "FLOAT32"))
    rope = AutoConfig.from_pretrained(locate_model(str(file))).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
    config = AutoConfig.for_model("gemma2", num_hidden_layers=46, hidden_size=64, num_attention_heads=4, head_dim=8)
    always: dict[str, Any] = dict.fromkeys(("context_length", "embedding_length", "feed_forward_length"), 64)
    always |= {"block_count": 46, "attention.head_count": 4, "attention.head_count_kv": 4, "attention.key_length": 8}
    always |= {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 20000.0}
    always |= {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    fields = {f"gemma2.{key}": value for key, value in always.items()}
    follow_keys(config, file, fields | {"general.architecture": "gemma2"})
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (20.0, 10.0)
    assert (config.query_pre_attn_scalar, config.rope_parameters["rope_theta"]) == (16, 20000.0)
    config = AutoConfig.for_model("phi3", hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    fields = {key.replace("gemma2", "phi3"): value for key, value in fields.items() if "softcap" not in key}
    fields |= {"phi3.attention.sliding_window": 7, "phi3.attention.key_length": 16, "general.architecture": "phi3"}
    follow_keys(config, file, fields)
    assert config.sliding_window == 7


@pytest.mark.slow
def test_a_name_that_the_reader_takes_for_another_family(tmp_path: Path) -> None:
    """With the general.name mistral it makes a configuration of that family, of which it then knows no tensors."""
    source = tmp_path / "mistral"
    config: dict[str, Any] = {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    random_model("mistral", vocab_size=FEW_TOKENS, dtype=torch.float16, **config).save_pretrained(source)
    niwaki.export(add_small_tokenizer(source), tmp_path / "model.gguf", "gguf-f16")
    directory = locate_model(str(tmp_path / "model.gguf"))
    read = AutoConfig.from_pretrained(directory)
    assert (read.model_type, read.num_key_value_heads, read.rope_parameters["rope_theta"]) == ("llama", 2, 5e5)
    assert not hasattr(read, "sliding_window")
    torch.testing.assert_close(logits(directory), logits(source), atol=1e-3, rtol=1e-3)
    niwaki.prune(directory, tmp_path / "pruned", 0.5, **PLAIN)


def test_no_code_beside_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody is asked"))
    where = {"AutoTokenizer": ["beside.Tokenizer", "beside.Tokenizer"], "AutoConfig": "beside.Config"}
    for name in ("tokenizer_config.json", "config.json"):
        (file.parent / name).write_text(json.dumps({"auto_map": where, "model_type": "llama"}))
    (file.parent / "beside.py").write_text("raise AssertionError('this is run')")
    (file.parent / "generation_config.json").write_text("{")
    directory = locate_model(str(file))
    assert "auto_map" not in (directory / "config.json").read_text() + (directory / "tokenizer_config.json").read_text()


def test_names_are_limited_in_bytes(file: Path) -> None:
    renamed = file.rename(file.with_name(f"{'木' * 80}.gguf"))
    assert (locate_model(str(renamed)) / SINGLE_NAME).exists()


def test_blocks_that_are_not_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("transformers is asked"))
    changed(file, given("llama.block_count", 10**9, "UINT32"))
    assert "tensors of 2 blocks, and says that it has 1000000000" in refused(file)


def test_sizes_that_nothing_is_there_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("memory is taken"))
    changed(file, given("llama.feed_forward_length", 10**8, "UINT32"))
    assert "that its sizes ask for" in refused(file)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs gguf: pip install" in message(lambda: locate_model(str(tmp_path / "model.gguf")), CheckpointError)


def test_no_file_of_that_name(tmp_path: Path) -> None:
    assert "there is no directory" in message(lambda: locate_model(str(tmp_path / "model.gguf")), UsageError)
