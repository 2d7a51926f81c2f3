"""Encoders with decoders as wholes: pruned, quantized, healed and shrunk on pairs of text, or of sound and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GPT2Config,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
)

import niwaki
from niwaki import Compute, Measurement, NiwakiError
from niwaki.choices import HealingMethod
from niwaki.models.pairs import count_tokens
from support.command import Command, Result
from support.covering import FULL
from support.models import add_tokenizer
from support.pairs import KINDS, class_of, logits_of, pairs_of, reference_of, rows, save_pair_model, write_pairs
from support.runs import StopAt, files, tensors, zeros

CPU = Compute("cpu", "float32")
PAIRS = 40


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def dense(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("both") / kind, kind)


@pytest.fixture(scope="module")
def pruned(kind: str, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("both") / "pruned"
    niwaki.prune(dense, out, 0.6, effort="fast", **text(kind))
    return out


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that knows words, which no test changes."""
    return save_pair_model(tmp_path_factory.mktemp("both") / "t5", "t5", with_words=True)


def text(kind: str) -> dict[str, Any]:
    every = rows(kind, PAIRS)
    return {"calibration": every[:32], "measurement": Measurement(every[32:]), "compute": CPU}


def logits(directory: Path, kind: str) -> list[Tensor]:
    model = reference_of(directory, kind)
    with torch.no_grad():
        return [logits_of(model, kind, pair) for pair in pairs_of(kind, PAIRS)]


def divergence(dense: list[Tensor], other: list[Tensor]) -> float:
    p, q = (torch.cat(each).double().log_softmax(1) for each in (dense, other))
    return float((p.exp() * (p - q)).sum(1).mean())


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.slow
def test_half_of_each_model_goes(dense: Path, kind: str, effort: str, tmp_path: Path) -> None:
    if (kind != "t5" and effort == "fast") or not (FULL or kind in ("t5", "whisper", "switch_transformers")):
        pytest.skip("what healing starts from, or much the same")
    record = niwaki.prune(dense, tmp_path / "out", 0.5, effort=effort, **text(kind))
    before, after = tensors(dense), tensors(tmp_path / "out")
    changed = {key: value for key, value in after.items() if not torch.equal(value, before[key])}
    assert any(".encoder." in f".{key}" for key in changed)
    assert any("EncDecAttention" in key or "encoder_attn" in key for key in changed)
    assert record.sparsity == pytest.approx(0.5, abs=0.02)
    weights = sum(each.numel() for each in changed.values())
    assert sum(map(zeros, changed.values())) / weights == pytest.approx(0.5, abs=0.02)
    # What is measured is what transformers makes of what was written.
    measured = record.perplexity["after"]
    assert measured.windows == 8
    assert measured.nats == pytest.approx(loss(tmp_path / "out", kind, measured.tokens), rel=1e-4)
    assert record.calibration["pairs"] == count_tokens(rows(kind, PAIRS)[:32])
    assert not [note for note in record.notes if "wrote no text" in note or "tested with" in note]


def loss(directory: Path, kind: str, tokens: int) -> float:
    """The mean over so many tokens of the targets that are measured on."""
    pairs = zip(logits(directory, kind), pairs_of(kind, PAIRS), strict=True)
    losses = [
        torch.nn.functional.cross_entropy(said, torch.tensor(ids[1:]), reduction="sum") for said, (_, ids) in pairs
    ]
    return float(sum(losses[32:])) / tokens


@pytest.mark.parametrize("some", ["whisper", *["t5"] * FULL])
def test_a_stopped_run_comes_to_the_same_bytes(some: str, tmp_path: Path) -> None:
    dense, given = save_pair_model(tmp_path / "model", some), text(some)
    niwaki.prune(dense, tmp_path / "whole", 0.5, **given)
    for matrices in (20, 25):
        with pytest.raises(KeyboardInterrupt):
            niwaki.prune(dense, tmp_path / "out", 0.5, **given, progress=StopAt(matrices))
    niwaki.prune(dense, tmp_path / "out", 0.5, **given)
    assert files(tmp_path / "out", "recipe.toml") == files(tmp_path / "whole", "recipe.toml")


@pytest.mark.parametrize("some", ["t5", "bart"])
def test_weights_go_on_a_grid(some: str, tmp_path: Path) -> None:
    dense = save_pair_model(tmp_path / "model", some)
    record = niwaki.quantize(dense, tmp_path / "out", "int8:8", **text(some))
    assert record.perplexity["after"].above(record.perplexity["before"]).nats < 0.05
    assert reference_of(tmp_path / "out", some)


@pytest.mark.parametrize("method", ["full", "lora", "norms", "blocks"])
@pytest.mark.slow
def test_healing_comes_nearer_to_the_dense_model(
    request: pytest.FixtureRequest, dense: Path, kind: str, method: HealingMethod, tmp_path: Path
) -> None:
    every = [("t5", "full"), ("t5", "lora"), ("switch_transformers", "full"), ("whisper", "blocks")]
    if not FULL and (kind, method) not in every:
        pytest.skip("much the same in all")
    pruned: Path = request.getfixturevalue("pruned")
    healed, given = tmp_path / "healed", {"tokens": 2000, "rate": 3e-3, **text(kind)}
    record = niwaki.heal(pruned, healed, teacher=dense, method=method, **given)
    before, after = tensors(pruned), tensors(healed)
    for key, value in before.items():
        if value.ndim == 2 and 0.3 < zeros(value) / value.numel() < 1:
            assert torch.equal(value == 0, after[key] == 0)
    said = logits(dense, kind)
    first, last = (divergence(said, logits(path, kind)) for path in (pruned, healed))
    assert last < first
    assert record.healing
    assert record.healing.own_text == 0
    assert record.healing.points[record.healing.best or 0].error < record.healing.points[0].error


def test_what_healing_starts_from_is_the_divergence_of_targets(tmp_path: Path) -> None:
    dense = save_pair_model(tmp_path / "t5", "t5")
    niwaki.prune(dense, tmp_path / "pruned", 0.6, effort="fast", **text("t5"))
    alike = rows("t5", PAIRS)[:1].repeat(12, 1)  # so that it does not matter which are held out
    given: dict[str, Any] = {"tokens": 500, "calibration": alike, "measurement": None, "compute": CPU}
    record = niwaki.heal(tmp_path / "pruned", tmp_path / "healed", teacher=dense, **given)
    expected = divergence(logits(dense, "t5")[:1], logits(tmp_path / "pruned", "t5")[:1])
    assert record.healing
    assert record.healing.points[0].error == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("removed", [{"blocks": 2}, {"neurons": 0.5}, {"blocks": 1, "neurons": 0.5}])
@pytest.mark.slow
def test_blocks_and_neurons_go(kind: str, dense: Path, removed: dict[str, Any], tmp_path: Path) -> None:
    if kind == "switch_transformers":
        pytest.skip("has experts, and two blocks in each list")
    if not FULL and (kind not in ("t5", "whisper") or (kind == "t5") == (len(removed) == 2)):
        pytest.skip("each in one, both at once in another")
    record = niwaki.shrink(dense, tmp_path / "out", **removed, **text(kind))
    model, info = class_of(kind).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert record.structure
    names = ("num_layers", "num_decoder_layers") if kind == "t5" else ("encoder_layers", "decoder_layers")
    assert sum(getattr(model.config, name) for name in names) == 6 - removed.get("blocks", 0)
    assert not {0, 3} & {*record.structure.blocks}  # the first of each list stay
    after = record.perplexity["after"]
    assert after.nats == pytest.approx(loss(tmp_path / "out", kind, after.tokens), rel=1e-4)


def test_no_more_blocks_go_than_can(t5: Path, tmp_path: Path) -> None:
    with pytest.raises(NiwakiError, match="0 to 4"):
        niwaki.shrink(t5, tmp_path / "out", blocks=5, **text("t5"))


@pytest.mark.parametrize("some", ["t5", *["marian"] * FULL])
def test_a_file_of_pairs(niwaki_: Command, some: str, tmp_path: Path) -> None:
    model = save_pair_model(tmp_path / "model", some, with_words=True)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 40)
    out, again = tmp_path / "out", tmp_path / "again"
    result = pruned_on(niwaki_, model, pairs, out, 24)
    assert result.code == 0, result.err
    assert "24 pairs with" in result.out
    assert "bits a byte" in result.out
    record = json.loads((out / "niwaki.json").read_text())
    assert record["perplexity"]["after"]["windows"] == 16
    assert "pairs of a source and a target" in record["calibration"]["origin"]
    result = niwaki_("eval", out, "--text", pairs, "--samples", 16)
    assert result.code == 0, result.err
    result = niwaki_("run", model, again, "--recipe", out / "recipe.toml", "--calibration", pairs)
    assert result.code == 0, result.err
    assert files(again, "recipe.toml", "README.md") == files(out, "recipe.toml", "README.md")


def test_files_of_sound(niwaki_: Command, tmp_path: Path) -> None:
    model = save_pair_model(tmp_path / "model", "whisper", with_words=True)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 24, sounds=True)

    def calibration(name: str) -> dict[str, Any]:
        result = pruned_on(niwaki_, model, pairs, tmp_path / name, 16)
        assert result.code == 0, result.err
        found: dict[str, Any] = json.loads((tmp_path / name / "niwaki.json").read_text())["calibration"]
        return found

    def check(said: str) -> None:
        check_refusal(pruned_on(niwaki_, model, pairs, tmp_path / "none", 16), said, tmp_path / "none")

    first = calibration("out")
    assert "pairs of sound and text" in first["origin"]
    (tmp_path / "3.wav").write_bytes((tmp_path / "4.wav").read_bytes())
    assert calibration("other")["tokens_sha256"] != first["tokens_sha256"]
    (tmp_path / "5.wav").unlink()
    check("5.wav")
    check("line 6")
    (tmp_path / "5.wav").write_text("no sound")
    check("5.wav cannot be read as sound")
    (model / "preprocessor_config.json").unlink()
    check("no processor of sound")


def pruned_on(niwaki_: Command, model: Path, given: object, out: Path, samples: int = 8) -> Result:
    return niwaki_("prune", model, out, "--pattern", "0.5", "--calibration", given, "--samples", samples)


def check_refusal(result: Result, said: str, out: Path) -> None:
    assert result.code not in (0, 70)
    assert said in result.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"source": "a b"}\n', "no target"),
        ('{"target": "a b"}\n', "no source"),
        ('{"source": "a", "target": " "}\n', "no target"),
        ('{"source": 4, "target": "a"}\n', "no source"),
        ('"a text"\n', "no source"),
        ('{"text": "a text"}\n', "'text'"),
        ('{"source": "a", "target": "b"}\n', "1 pair, and 8 are needed"),
        ("", "0 pairs"),
    ],
)
def test_what_is_no_pair_is_said(niwaki_: Command, t5: Path, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(content)
    check_refusal(pruned_on(niwaki_, t5, tmp_path / "pairs.jsonl", tmp_path / "out"), said, tmp_path / "out")


@pytest.mark.parametrize("source", ["demo", "c4", "text.txt"])
def test_running_text_is_refused(
    niwaki_: Command, t5: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text " * 200)
    result = pruned_on(niwaki_, t5, source, tmp_path / "out")
    check_refusal(result, "running text", tmp_path / "out")
    assert '"target"' in result.err


def test_a_model_without_the_files_of_its_tokenizer(niwaki_: Command, tmp_path: Path) -> None:
    # transformers makes a tokenizer of the model's type that knows no words.
    model, pairs = save_pair_model(tmp_path / "model", "t5"), write_pairs(tmp_path / "pairs.jsonl", 12)
    result = pruned_on(niwaki_, model, pairs, tmp_path / "out")
    check_refusal(result, "no tokenizer that can be loaded", tmp_path / "out")


def test_long_pairs_are_cut_with_a_note(niwaki_: Command, tmp_path: Path) -> None:
    model = save_pair_model(tmp_path / "model", "bart", with_words=True)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    long = json.dumps({"source": "a long text " * 200, "target": "short"})
    pairs.write_text(f"{long}\n{pairs.read_text()}")
    result = pruned_on(niwaki_, model, pairs, tmp_path / "out")
    assert result.code == 0, result.err
    assert "1 source or target of" in result.out + result.err
    assert "cut to 64 tokens" in result.out + result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate MODEL text", "continue a text"),
        ("bench MODEL", "continue a text"),
        ("shrink MODEL OUT --heads 0.5 --calibration PAIRS", "heads of this kind"),
        ("shrink MODEL OUT --vocabulary used --calibration PAIRS", "removing tokens is not supported"),
        ("prune MODEL OUT --pattern 0.5 --calibration PAIRS --field source", "--field"),
        ("prune MODEL OUT --pattern 0.5 --calibration PAIRS --no-bos", "--no-bos"),
        ("export MODEL OUT --format gguf-q8_0", "t5"),
        ("compress MODEL OUT --size 0.5", "transformers"),
        ("eval MODEL", "--text"),
    ],
)
def test_what_is_not_for_them_is_said_in_a_line(
    niwaki_: Command, t5: Path, arguments: str, said: str, tmp_path: Path
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    places = {"MODEL": t5, "OUT": tmp_path / "out", "PAIRS": pairs}
    result = niwaki_(*(places.get(each, each) for each in arguments.split()))
    check_refusal(result, said, tmp_path / "out")


def test_packed_integers_of_t5_are_refused(tmp_path: Path) -> None:
    dense = save_pair_model(tmp_path / "model", "t5")
    niwaki.quantize(dense, tmp_path / "out", "int4:16", effort="fast", **text("t5"))
    with pytest.raises(NiwakiError, match="transformers cannot load"):
        niwaki.export(tmp_path / "out", tmp_path / "exported")


def test_sound_is_read_as_it_is_within_a_step_in_half_precision(tmp_path: Path) -> None:
    model = save_pair_model(tmp_path / "model", "whisper", with_words=True)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16, sounds=True)
    half, some = Compute("cpu", "bfloat16"), niwaki.Calibration(str(pairs), samples=12)
    niwaki.prune(model, tmp_path / "pruned", 0.5, effort="fast", calibration=some, compute=half, measurement=None)
    given: dict[str, Any] = {"calibration": str(pairs), "compute": half, "measurement": None}
    niwaki.heal(tmp_path / "pruned", tmp_path / "healed", teacher=model, tokens=300, **given)


def test_images_and_two_models_put_together(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = ViTConfig(image_size=16, patch_size=8, **sizes)
    ends: dict[str, Any] = {"add_cross_attention": True, "is_decoder": True}
    decoder = GPT2Config(vocab_size=4096, n_embd=32, n_layer=2, n_head=4, **ends)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    VisionEncoderDecoderModel(config).save_pretrained(tmp_path / "model")
    model = add_tokenizer(tmp_path / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(model)
    lines = []
    for i in range(16):
        image.new("RGB", (20 + i, 24), (16 * i, 100, 255 - 16 * i)).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"source": f"{i}.png", "target": f"number {i} and {i * i}"}))
    pairs = tmp_path / "pairs.jsonl"
    measured = tmp_path / "measured.jsonl"
    for file in (pairs, measured):
        file.write_text("\n".join(lines))
    given: dict[str, Any] = {"calibration": niwaki.Calibration(str(pairs), samples=12), "compute": CPU}
    record = niwaki.prune(model, tmp_path / "out", 0.5, **given, measurement=str(measured))
    whole = VisionEncoderDecoderModel.from_pretrained(tmp_path / "out").eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(model), ViTImageProcessor.from_pretrained(model)
    losses = []
    for line in map(json.loads, lines):
        pixels = processor(image.open(tmp_path / line["source"]), return_tensors="pt")["pixel_values"]
        ids = torch.tensor([[1, *tokenizer(line["target"])["input_ids"]]])
        with torch.no_grad():
            said = whole(pixel_values=pixels, decoder_input_ids=ids[:, :-1]).logits
        losses.append(torch.nn.functional.cross_entropy(said[0], ids[0, 1:], reduction="sum"))
    after = record.perplexity["after"]
    assert after.windows == 16
    assert after.nats == pytest.approx(float(sum(losses)) / after.tokens, rel=1e-4)
    niwaki.heal(tmp_path / "out", tmp_path / "healed", teacher=model, tokens=300, calibration=str(pairs), compute=CPU)
    with pytest.raises(NiwakiError, match="parts of this kind"):
        niwaki.shrink(model, tmp_path / "smaller", blocks=1, **given)
    (tmp_path / "3.png").write_text("no image")
    with pytest.raises(NiwakiError, match=r"line 4.*cannot be read as an image"):
        niwaki.prune(model, tmp_path / "none", 0.5, **given)
