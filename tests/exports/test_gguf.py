"""Files for llama.cpp: transformers' own reader, llama.cpp's formulas and llama.cpp itself are the judges."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import niwaki
from niwaki import Calibration
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CalibrationError, CheckpointError, NiwakiError, UnsupportedModelError, UsageError
from niwaki.exports import gguf_file
from niwaki.exports.gguf_architectures import ARCHITECTURES
from niwaki.records.progress import Progress
from support.llama_cpp import LLAMA_CPP, ask, distance
from support.models import (
    EMBEDDED,
    EMBEDDED_VOCABULARY,
    FEW_TOKENS,
    FOR_LLAMA_CPP,
    add_small_tokenizer,
    begin_texts,
    edit_json,
    format_of,
    message,
    random_model,
    random_tokens,
    save_model,
    save_model_with_tokenizer,
)
from support.small_tokenizers import save_with_pieces

gguf: Any = pytest.importorskip("gguf")

formulas: Any = pytest.importorskip("support.gguf_formulas")
gguf_files: Any = pytest.importorskip("support.gguf_files")

TEXT = "The old man sat by the river in 1984, and didn't say a word.\n\n  </s> WE'LL go: Größe 東京 ½"


def saved(path: Path, case: str, **changes: Any) -> Path:
    random_model(case, vocab_size=FEW_TOKENS, **changes).save_pretrained(path)
    return add_small_tokenizer(path)


def exported(path: Path, case: str, kind: Any = "F16", **changes: Any) -> tuple[Path, list[str]]:
    """A file of a random model, and what there was to say of it."""
    file = path / "model.gguf"
    return file, niwaki.export(saved(path / "source", case, **changes), file, format_of(kind))


def logits(path: Path, tokens: Tensor | None = None, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    with torch.no_grad():
        values: Tensor = model(random_tokens(2, 20) if tokens is None else tokens).logits
    return values


@pytest.mark.parametrize("case", ["llama", "llama grouped", "llama tied", "mistral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.slow
def test_transformers_reads_the_same_model(tmp_path: Path, case: str) -> None:
    source = saved(tmp_path / "source", case)
    niwaki.export(source, tmp_path / "model.gguf", "gguf-f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "source"]
    # For Qwen3 this reader takes neither the heads' width nor that of the experts from the file.
    options = {"config": AutoConfig.from_pretrained(source)} if case.startswith("qwen3") else {}
    tokens = random_tokens(1, 20)[0].tolist()
    read = formulas.File(tmp_path / "model.gguf")
    assert distance(read.logits(tokens), logits(source, random_tokens(1, 20))[0]).max() < 0.01
    assert read.split(TEXT) == AutoTokenizer.from_pretrained(source)(TEXT).input_ids
    read = logits(tmp_path, gguf_file="model.gguf", **options)
    torch.testing.assert_close(read, logits(source), atol=0.02, rtol=0.01)  # weights in half precision
    if case.startswith("qwen"):  # for which this reader has a splitter of its own
        return
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert theirs(TEXT).input_ids == AutoTokenizer.from_pretrained(source)(TEXT).input_ids


#: Made by scripts/compare_gguf.py.
CONVERTED = json.loads((Path(__file__).parent / "converter.json").read_text())
#: Keys that say what llama.cpp takes without them too, and what the converter leaves out although it is needed.
SAID = {"vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"}
SAID |= {"attention.sliding_window_pattern", "expert_feed_forward_length", "rope.scaling.attn_factor"}
#: What niwaki says in another way, or has reasons to say otherwise.
OTHERWISE = {
    *(("phi3 long", "context_length"), ("cohere2", "rope.scaling.type")),
    ("ministral3", "rope.scaling.yarn_log_multiplier"),
    *(("gpt_oss", f"rope.scaling.yarn_beta_{speed}") for speed in ("fast", "slow")),
    *((case, "rope.scaling.original_context_length") for case in ("phi3", "phi3 partial")),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in FOR_LLAMA_CPP])
def test_the_same_as_llama_cpps_converter(tmp_path: Path, case: str) -> None:
    file, _ = exported(tmp_path, case)
    ours, theirs = gguf_files.summary(file), CONVERTED[case]
    assert ours["name"] == theirs["name"]
    differing = {key for key in ours["keys"] | theirs["keys"] if ours["keys"].get(key) != theirs["keys"].get(key)}
    assert {(case, key) for key in differing - SAID} <= OTHERWISE
    shapes, expected = ({name: shape for name, (shape, _) in each["tensors"].items()} for each in (ours, theirs))
    assert shapes == expected
    for tensor in gguf.GGUFReader(file).tensors:
        far = float(np.linalg.norm(tensor.data.astype(np.float64))) / 1000
        assert ours["tensors"][tensor.name][1] == pytest.approx(theirs["tensors"][tensor.name][1], abs=far), tensor.name


def test_the_types_that_the_documentation_lists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "llama-cpp.md").read_text()
    table = page.split("## Types of models")[1].split("\n\n")[1].splitlines()[2:]
    listed: dict[str, str] = {}
    for row in table:
        _, types, name, *_ = row.split("|")
        listed |= dict.fromkeys(re.findall("`(.+?)`", re.sub(r"\(also within .*\)", "", types)), name.strip(" `"))
    names = gguf.MODEL_ARCH_NAMES
    known = {kind: names[gguf.MODEL_ARCH[each.name]] for kind, each in ARCHITECTURES.items()}
    assert listed == known


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.slow
def test_values_in_groups(tmp_path: Path, kind: Any) -> None:
    niwaki.export("demo", tmp_path / "model.gguf", format_of(kind))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert (stored["blk.0.ffn_down.weight"], stored["token_embd.weight"]) == (kind, "Q8_0")
    assert stored["blk.0.attn_norm.weight"] == "F32"
    down = AutoModelForCausalLM.from_pretrained(EMBEDDED).model.layers[0].mlp.down_proj.weight.detach().float().numpy()
    one = tensors["blk.0.ffn_down.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(down, one.tensor_type), one.tensor_type)
    assert (gguf.quants.dequantize(one.data, one.tensor_type) == expected).all()


@pytest.mark.slow
def test_zeros_stay(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "source", "llama"), tmp_path / "pruned"
    niwaki.prune(source, out, 0.5, effort="fast", solver="magnitude", calibration="demo", measurement=None)
    niwaki.export(out, tmp_path / "model.gguf", "gguf-q8_0")
    pruned = AutoModelForCausalLM.from_pretrained(out).model.layers[1].mlp.up_proj.weight
    assert int((pruned == 0).sum()) == pruned.numel() // 2
    (one,) = [t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "blk.1.ffn_up.weight"]
    read = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type))
    assert (read[pruned == 0] == 0).all()


def test_stretched_positions(tmp_path: Path) -> None:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, **bands}
    source = saved(tmp_path / "source", "llama", rope_parameters=rope)
    niwaki.export(source, tmp_path / "model.gguf", "gguf-f16")
    (one,) = [t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight"]
    model = AutoModelForCausalLM.from_pretrained(source)
    plain = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / torch.from_numpy(one.data.copy()), model.model.rotary_emb.inv_freq)


def too_large(path: Path) -> None:
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    edit_json(path / "tokenizer.json", model={**model, "vocab": {**model["vocab"], "niwaki": EMBEDDED_VOCABULARY}})


def change(**tensors: Any) -> Callable[[Path], None]:
    """Changes the tensors of a model's file; None removes one. In names ``__`` stands for a point."""

    def apply(path: Path) -> None:
        file = path / "model.safetensors"
        kept = load_file(file) | {key.replace("__", "."): value for key, value in tensors.items()}
        save_file({key: value for key, value in kept.items() if value is not None}, file, {"format": "pt"})

    return apply


Q_PROJ = "model__layers__1__self_attn__q_proj__weight"


@pytest.mark.parametrize(
    ("spoil", "kind", "error", "said"),
    [
        (too_large, "F16", CheckpointError, "has the token 4096, of 4096"),
        (lambda path: (path / "tokenizer.json").unlink(), "F16", CalibrationError, "tokenizer.json"),
        (
            lambda path: None,
            "Q5_0",
            UsageError,
            "format must be packed, compressed-tensors, w8a8, fp8, gguf, gguf-f16, ",
        ),
        (change(**{Q_PROJ: None}), "F16", CheckpointError, "layers.1.self_attn.q_proj.weight"),
        (change(**{Q_PROJ: torch.ones(32, 8)}), "F16", CheckpointError, "(32, 8)"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, spoil: Any, kind: Any, error: type[NiwakiError], said: str) -> None:
    source = save_model_with_tokenizer(tmp_path / "source")
    spoil(source)
    assert said in message(lambda: niwaki.export(source, tmp_path / "model.gguf", format_of(kind)), error)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("kind", "largest", "said"),
    [
        ("F16", 65_530.0, "'model.layers.1.self_attn.q_proj.weight' has a weight of 65530"),
        ("Q8_0", 65_530.0, "a weight of 65530"),
        ("Q4_0", 65_530.0 * 8, "a weight of 524240"),
        ("F16", 3e-8, "too small for F16: 0 of 1,024"),
        ("Q8_0", 3e-6, "32 of 32 scales"),
        ("Q4_0", 1e-7, "32 of 32 scales"),
        ("F16", float("inf"), "NaN or infinite"),
    ],
)
@pytest.mark.slow
def test_values_beyond_half_precision(tmp_path: Path, kind: Any, largest: float, said: str) -> None:
    """Scales of groups are numbers of half precision, as all weights are in F16, and so is what comes of them."""
    source, file = save_model_with_tokenizer(tmp_path / "source"), tmp_path / "model.gguf"
    change(**{Q_PROJ: torch.full((32, 32), largest)})(source)
    error = CheckpointError if largest == float("inf") else UnsupportedModelError
    assert said in message(lambda: niwaki.export(source, file, format_of(kind)), error)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    if largest > 1:
        change(**{Q_PROJ: torch.full((32, 32), min(65_504.0, largest))})(source)
        niwaki.export(source, file, format_of(kind))


def test_rows_that_have_no_groups(tmp_path: Path) -> None:
    file, notes = exported(tmp_path, "llama", "Q8_0", intermediate_size=179)
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert (stored["blk.1.ffn_down.weight"], stored["blk.1.ffn_up.weight"]) == ("F16", "Q8_0")
    assert all(part in notes[0] for part in ("2 of 21 tensors", "'model.layers.0.mlp.down_proj.weight'", "179"))


@pytest.mark.slow
def test_tensors_that_transformers_has_no_place_for(tmp_path: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "source")
    change(model__layers__2__mlp__up_proj__weight=torch.ones(2, 2))(source)
    change(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))(source)
    (note,) = niwaki.export(source, tmp_path / "model.gguf", "gguf-f16")
    assert "model.layers.2 (beyond the model's 2 blocks), 1 tensor" in note
    assert not any("blk.2" in tensor.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors)


def test_other_families_and_places(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt2")
    said = message(lambda: niwaki.export(source, tmp_path / "model.gguf", "gguf-q8_0"), UnsupportedModelError)
    assert all(kind in said for kind in ("gpt2", *ARCHITECTURES))
    (tmp_path / "there.gguf").touch()
    assert "exists" in message(lambda: niwaki.export("demo", tmp_path / "there.gguf", "gguf-q8_0"))
    assert "no directory" in message(lambda: niwaki.export("demo", tmp_path / "none" / "model.gguf", "gguf-q8_0"))


def test_names_without_that_of_the_model(tmp_path: Path) -> None:
    """As embedding models have them, which have no head."""
    model = random_model("qwen3", vocab_size=FEW_TOKENS, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "bare")
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    for name in ("whole", "bare"):
        niwaki.export(add_small_tokenizer(tmp_path / name), tmp_path / f"{name}.gguf", "gguf-f16")
    assert gguf_files.summary(tmp_path / "bare.gguf") == gguf_files.summary(tmp_path / "whole.gguf")


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"pooling_mode_lasttoken": True}, 3),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, 1),
        ({"pooling_mode": "cls"}, 2),
        ({"pooling_mode_max_tokens": True}, None),
        (None, None),
    ],
)
def test_how_tokens_become_a_vector(tmp_path: Path, settings: dict[str, Any] | None, number: int | None) -> None:
    """As the files of sentence-transformers say beside a model; others say nothing."""
    source, file = saved(tmp_path / "source", "qwen3"), tmp_path / "model.gguf"
    if settings is not None:
        modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]
        (source / "modules.json").write_text(json.dumps(modules))
        (source / "1_Pooling").mkdir()
        (source / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    notes = niwaki.export(source, file, "gguf-f16")
    assert gguf_files.summary(file)["keys"].get("pooling_type") == number
    assert any("no vectors of texts by 'max'" in note for note in notes) == ("max" in str(settings))


def test_no_place_of_the_model(tmp_path: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "source")
    (source / "inner").mkdir()
    (tmp_path / "link").symlink_to(source)
    for out in (source / "model.gguf", source / "inner" / "model.gguf", tmp_path / "link" / "model.gguf"):
        assert "inside the model's own" in message(lambda out=out: niwaki.export(source, out, "gguf-q8_0"))  # type: ignore[misc]
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "nowhere")
    assert "exists" in message(lambda: niwaki.export(source, tmp_path / "dangling.gguf", "gguf-q8_0"))
    assert not (tmp_path / "nowhere").exists()


def test_two_exports_to_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, file = save_model_with_tokenizer(tmp_path / "source"), tmp_path / "model.gguf"
    read, said = gguf_file._check_values, list[str]()

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(gguf_file, "_check_values", read)
        said.append(message(lambda: niwaki.export(source, file, "gguf-q8_0")))
        return read(*arguments)

    monkeypatch.setattr(gguf_file, "_check_values", meanwhile)
    niwaki.export(source, file, "gguf-f16")
    assert "another run" in said[0]
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors} == {"F16", "F32"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "source"]


@pytest.mark.slow
def test_what_has_the_name_of_the_temporary_file(tmp_path: Path) -> None:
    source, file, temporary = tmp_path / "source", tmp_path / "model.gguf", tmp_path / ".model.gguf.partial"
    save_model_with_tokenizer(source)
    (tmp_path / "mine").write_text("mine")
    for link in (tmp_path / "mine", tmp_path / "nowhere"):
        temporary.symlink_to(link)
        assert "is a link" in message(lambda: niwaki.export(source, file, "gguf-q8_0"))
        temporary.unlink()
    temporary.write_text("mine, too")
    assert "move it away" in message(lambda: niwaki.export(source, file, "gguf-q8_0"))
    assert temporary.read_text() == "mine, too"
    for left in (b"", b"GGUF and what was written until the process was killed" * 100_000):
        temporary.write_bytes(left)
        niwaki.export(source, file, "gguf-f16")
        assert not temporary.exists()
        assert len(gguf.GGUFReader(file).tensors) == 20
        assert file.stat().st_mode & 0o777 == 0o666 & ~current_umask()
        file.unlink()
    assert (tmp_path / "mine").read_text() == "mine"


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def compare(path: Path, files: list[tuple[Path, Path, float]]) -> None:
    """llama.cpp's tokens and logits of files with transformers' of the directory each is of, how far they may be off.

    Of a file that rounds with those of the formulas, which have the rounded weights. All from one process.
    """
    tokens = random_tokens(1, 20)
    questions = [(file, [TEXT, "a"], tokens[0].tolist()) for _, file, _ in files]
    for (source, file, far), answer in zip(files, ask(path, questions), strict=True):
        assert not answer.error, f"{source}: {answer.error}"
        tokenizer = AutoTokenizer.from_pretrained(source)
        assert answer.split == [tokenizer(text).input_ids for text in (TEXT, "a")]
        config = AutoConfig.from_pretrained(source)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        model = auto.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
        with torch.no_grad():
            expected = model(tokens).logits[0]
        if far > 0.05:
            expected = formulas.File(file).logits(tokens[0].tolist())
        off = distance(answer.logits, expected)[: answer.length]
        # Inputs are rounded there, so that a token may go to another expert.
        assert off.quantile(0.75 if hasattr(config, "num_experts_per_tok") else 1.0) < far, f"{source}: {off}"


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="needs node-llama-cpp in $NIWAKI_LLAMA_CPP")
def test_llama_cpp_computes_the_same(tmp_path: Path) -> None:
    """Each family, and each kind of what is no default and is written all the same."""
    rope = {"rope_theta": 100.0, "factor": 8.0}
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        *((case, "F16", {}) for case in FOR_LLAMA_CPP),
        ("llama tied", "Q8_0", {"intermediate_size": 179}),
        ("qwen3_moe", "Q8_0", {"moe_intermediate_size": 36, "num_experts_per_tok": 1}),
        ("llama", "Q4_0", {"head_dim": 16}),
        ("llama", "F16", {"rope_parameters": {"rope_type": "linear", **rope}}),
        ("llama", "F16", {"rope_parameters": {"rope_type": "llama3", **rope, **bands}}),
        ("qwen3", "F16", {"rope_parameters": {"rope_type": "linear", **rope}}),
        ("qwen2", "F16", {"rope_parameters": {"rope_type": "yarn", **rope, "original_max_position_embeddings": 16}}),
        ("qwen3", "F16", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 0.3}),
        ("mistral window", "F16", {}),
        ("qwen2 window", "F16", {}),
        ("qwen3_5_text", "F16", {"layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"]}),
    ]
    files = []
    for i, (case, kind, changes) in enumerate(cases):
        (place := tmp_path / str(i)).mkdir()
        file, _ = exported(place, case, kind, **changes)
        far = {"F16": 0.03 if "gemma" in case or "qwen3_5" in case else 0.01, "Q8_0": 0.1, "Q4_0": 0.2}
        files.append((place / "source", file, far[kind]))
    begin_texts(files[0][0])
    files[0][1].unlink()
    niwaki.export(files[0][0], files[0][1], "gguf-f16")
    compare(tmp_path, files)


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="needs node-llama-cpp in $NIWAKI_LLAMA_CPP")
@pytest.mark.parametrize("made", ["pruned", "shrunk", "in types", "fewer experts"])
def test_llama_cpp_computes_what_niwaki_made(tmp_path: Path, made: str) -> None:
    model = tmp_path / "model"
    few: dict[str, Any] = {"calibration": Calibration("demo", samples=8, length=64), "measurement": None}
    if made == "pruned":
        niwaki.prune("demo", model, 0.5, effort="fast", **few)
    elif made == "in types":
        niwaki.quantize("demo", model, "q4.9", embeddings="q5_1", effort="fast", **few)
        niwaki.export(model, tmp_path / "types.gguf", "gguf")
        compare(tmp_path, [(model, tmp_path / "types.gguf", 0.1)])
        return
    elif made == "shrunk":
        niwaki.shrink("demo", model, neurons=0.25, **few)
    else:
        niwaki.shrink(saved(tmp_path / "source", "qwen3_moe", moe_intermediate_size=32), model, experts=0.5, **few)
    kinds: dict[Any, float] = {"F16": 0.01, "Q8_0": 0.1, "Q4_0": 0.2}
    for kind in kinds:
        niwaki.export(model, tmp_path / f"{kind}.gguf", format_of(kind))
    compare(tmp_path, [(model, tmp_path / f"{kind}.gguf", far) for kind, far in kinds.items()])


@pytest.mark.parametrize("pieces", [False, True])
def test_how_many_bytes_a_tokenizer_takes(tmp_path: Path, pieces: bool) -> None:
    """Before a file is there: within what its other keys take; with scores, too."""
    source = save_with_pieces(tmp_path / "source") if pieces else EMBEDDED
    form = gguf_file.Gguf(Checkpoint(source), "F16", {}, Progress())
    niwaki.export(source, tmp_path / "model.gguf", "gguf-f16")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    taken = sum(part.nbytes for name, field in fields.items() if name.startswith("tokenizer") for part in field.parts)
    assert 0 <= taken - form.tokenizer_size < 1000
    assert pieces or form.tokenizer_size > 100_000
