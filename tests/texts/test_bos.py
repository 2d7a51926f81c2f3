"""The token that a tokenizer puts before a text: each window begins with it, and no token of the text is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

import niwaki
from niwaki import Calibration, Measurement
from niwaki.errors import CalibrationError, UsageError
from niwaki.healing.heal import _seen
from niwaki.healing.run import HealingRun
from niwaki.models.processes import World
from niwaki.models.tokens import find_bos, load_tokenizer
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.texts.own import synthesize, with_answers
from niwaki.texts.texts import Texts, read_heldout, read_windows
from support.command import Command
from support.models import (
    add_tokenizer,
    begin_texts,
    edit_json,
    message,
    reference,
    save_model_with_tokenizer,
    save_random,
)
from support.streams import stream_of

TEXT = " ".join(f"{n} men went to mow, went to mow a meadow;" for n in range(200))
SAID = "each window begins with BOS (token id 0)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return begin_texts(save_model_with_tokenizer(tmp_path / "model"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def ids(model: Path) -> list[int]:
    """The text's own tokens."""
    found: list[int] = load_tokenizer(model)(TEXT, add_special_tokens=False)["input_ids"]
    return found


def cut(ids: list[int], length: int) -> Tensor:
    """All windows of ``length`` tokens that begin with 0, one by one."""
    step = length - 1
    return torch.tensor([[0, *ids[i : i + step]] for i in range(0, len(ids) - step + 1, step)])


@torch.no_grad()
def perplexity(model: Path, windows: Tensor) -> float:
    """By transformers, window by window."""
    whole, losses = reference(model, torch.float64), list[float]()
    for window in windows:
        said = whole(window[None]).logits[0].log_softmax(-1)
        losses += [-said[i, window[i + 1]].item() for i in range(len(window) - 1)]
    return math.exp(math.fsum(losses) / len(losses))


# Which token


@pytest.mark.parametrize(
    ("template", "found"),
    [("<s> $A", 0), ("<s> $A </s>", 0), ("</s> $A", 1), ("$A </s>", None), ("$A", None), ("<s> </s> $A", None)],
)
def test_what_stands_before_a_text(model: Path, template: str, found: int | None) -> None:
    """It alone: whatever stands after the text does not count."""
    assert find_bos(load_tokenizer(begin_texts(model, template))) == found


class _Bytes(ByT5Tokenizer):
    """A tokenizer in Python, which puts what it is told around texts."""

    around: tuple[list[int], list[int]] = [], []

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: Any = None) -> list[int]:
        return [*self.around[0], *token_ids_0, *self.around[1]]


@pytest.mark.parametrize(("before", "after", "found"), [([2], [], 2), ([2], [1], 2), ([], [1], None)])
def test_tokenizers_in_python(tmp_path: Path, before: list[int], after: list[int], found: int | None) -> None:
    tokenizer: Any = _Bytes()
    tokenizer.around = before, after
    assert tokenizer("a")["input_ids"] == [*before, 100, *after]
    assert find_bos(tokenizer) == found
    (tmp_path / "a.txt").write_text("abcdefgh")
    tokens = read_windows(str(tmp_path / "a.txt"), tokenizer, 4).tokens.tolist()
    text = [byte + 3 for byte in b"abcdefgh"]
    assert tokens == ([[2, *text[:3]], [2, *text[3:6]]] if before else [text[:4], text[4:]])


def test_a_tokenizer_that_fails_on_other_text_than_the_given() -> None:
    def fail(text: str, **_: object) -> None:
        raise RuntimeError(f"no token for {text}")

    given: Any = fail
    assert find_bos(given) is None


@pytest.mark.parametrize(("plain", "whole"), [([], [1]), ([], [2, 1]), ([5, 5], [5, 5, 5])])
def test_tokenizers_that_do_not_tell(plain: list[int], whole: list[int]) -> None:
    """Of those that make no tokens of the sample, or one and the same, it could as well stand after the text."""

    def tokenizer(_: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": whole if add_special_tokens else plain}

    given: Any = tokenizer
    assert find_bos(given) is None


# Windows


def test_all_windows(model: Path, path: Path, ids: list[int]) -> None:
    tokenizer = load_tokenizer(model)
    windows = read_windows(str(path), tokenizer, 32)
    assert torch.equal(windows.tokens, cut(ids, 32))
    assert f"one text; {SAID}; all windows, {len(ids) % 31} tokens after them left out" in windows.origin
    assert windows.bos == 0
    without = read_windows(str(path), tokenizer, 32, bos=False)
    assert without.tokens.flatten().tolist() == ids[: len(ids) // 32 * 32]
    assert without.bos is None
    assert "no special tokens (no BOS)" in without.origin


def test_the_first_windows(model: Path, path: Path, ids: list[int]) -> None:
    tokenizer, most = load_tokenizer(model), len(ids) // 31
    for count, spare, expected in ((1, 0, 1), (3, 2, 5), (most, 7, most)):
        windows = read_windows(str(path), tokenizer, 32, count, spare=spare)
        assert torch.equal(windows.tokens, cut(ids, 32)[:expected])
    said = message(lambda: read_windows(str(path), tokenizer, 32, most + 1), CalibrationError)
    total = 31 * (most + 1)
    assert f"need {total} tokens" in said
    assert f"it has {len(ids)}, {total - len(ids)} are missing" in said
    assert f"--samples {most - 16}" in said  # which leaves some to measure on
    assert read_windows(str(path), tokenizer, 2, 5).tokens.tolist() == [[0, token] for token in ids[:5]]
    assert len(read_windows(str(path), tokenizer, len(ids) + 1, 1).tokens) == 1
    assert ", 1 are missing" in message(lambda: read_windows(str(path), tokenizer, len(ids) + 2, 1), CalibrationError)


def test_random_windows(model: Path, path: Path) -> None:
    tokenizer = load_tokenizer(model)
    windows = read_windows(str(path), tokenizer, 24, 6, order="random", seed=1).tokens
    assert windows.shape == (6, 24)
    assert (windows[:, 0] == 0).all()
    for window in windows:
        assert str(tokenizer.decode(window[1:])).strip("\ufffd") in TEXT


def test_texts_of_a_run(model: Path, path: Path, ids: list[int]) -> None:
    """What is measured follows what is calibrated on; windows that were given stay as they are."""
    whole, given = cut(ids, 32), torch.arange(96).view(3, 32)
    texts = Texts.read(stream_of(model), Calibration(str(path), 5, 32), Measurement(samples=4))
    assert torch.equal(texts.windows.tokens, whole[:5])
    assert texts.only is not None
    assert torch.equal(texts.only.tokens, whole[5:9])
    assert SAID in texts.only.origin
    described = texts.described(0)
    assert described["bos"] == 0
    assert SAID in described["origin"]
    texts = Texts.read(stream_of(model), Calibration([given, str(path)], 4, 32), Measurement(given))
    assert torch.equal(texts.windows.tokens, torch.stack([given[0], whole[0], given[1], whole[1], given[2]]))
    assert "bos" not in texts.described(0)
    assert texts.only is not None
    assert torch.equal(texts.only.tokens, given)
    plain = Texts.read(stream_of(model), Calibration(str(path), 5, 32, bos=False), Measurement(samples=4, bos=False))
    assert plain.windows.tokens.flatten().tolist() == ids[: 5 * 32]
    assert "bos" not in plain.described(0)
    with pytest.raises(UsageError, match="bos"):
        Texts.read(stream_of(model), Calibration(str(path), 5, 32), Measurement(samples=4, bos=False))


def test_an_encoder_reads_text_as_before(tmp_path: Path, path: Path, ids: list[int]) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
    config = AutoConfig.for_model("bert", vocab_size=4096, max_position_embeddings=64, **sizes)
    encoder = stream_of(begin_texts(add_tokenizer(save_random(tmp_path / "bert", config)), "<s> $A </s>"))
    assert encoder.sees_ahead
    assert Texts.read(encoder, Calibration(str(path), 2, 32), Measurement(samples=0)).windows.bos is None
    windows = read_heldout(encoder, str(path), Measurement(length=32, samples=2))
    assert windows.tokens.flatten().tolist() == ids[:64]


# What is measured and trained on


@pytest.mark.slow
def test_perplexity(model: Path, path: Path, ids: list[int]) -> None:
    """It is what transformers makes of the windows; the token before each is given, and not predicted."""
    found = niwaki.evaluate(model, Measurement(str(path), length=32))
    windows = cut(ids, 32)
    assert found.value == pytest.approx(perplexity(model, windows), rel=1e-5)
    assert (found.tokens, found.windows, found.context) == (31 * len(windows), len(windows), 32)
    assert SAID in found.protocol
    plain = niwaki.evaluate(model, Measurement(str(path), length=32, samples=3, bos=False))
    assert plain.value == pytest.approx(perplexity(model, torch.tensor(ids[:96]).view(3, 32)), rel=1e-5)


@pytest.mark.slow
def test_commands(niwaki_: Command, model: Path, path: Path, ids: list[int], tmp_path: Path) -> None:
    """One flag is for both texts."""
    for flag, begins in ((), True), (("--no-bos",), False):
        out = tmp_path / f"out{begins}"
        options = ["--calibration", path, "--samples", 3, "--length", 16, "--text-samples", 2, *flag]
        assert niwaki_("prune", model, out, "--sparsity", 0.5, "--solver", "magnitude", *options).code == 0
        record = Record.load(out / "niwaki.json")
        assert (record.calibration.get("bos"), SAID in record.calibration["origin"]) == (0 if begins else None, begins)
        measured = record.perplexity["before"]
        windows = cut(ids, 16)[3:5] if begins else torch.tensor(ids[48:80]).view(2, 16)
        assert measured.value == pytest.approx(perplexity(model, windows), rel=1e-5)
        assert (SAID in measured.origin) == begins
        values = tmp_path / "values.json"
        assert niwaki_("eval", model, "--text", path, "--length", 16, "--record", values, *flag).code == 0
        assert (SAID in json.loads(values.read_text())["perplexity"]["protocol"]) == begins
    assert niwaki_("eval", model, "--tasks", "which-follows", "--no-bos").code == 2


def test_what_the_model_writes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text after that token, of which each window has one: no other token is lost."""
    monkeypatch.setattr("niwaki.texts.own._LONGEST", 10)
    asked: list[Tensor] = []

    def write(_: Any, prompts: Tensor, length: int, *__: Any) -> Tensor:
        asked.append(prompts)
        assert length == 10
        return torch.cat([prompts, prompts[:, 1:] + torch.arange(1, 9)], dim=1)

    monkeypatch.setattr("niwaki.texts.own.continued", write)
    found = synthesize(stream_of(model), 3, 24, None, World(), Progress(), bos=0)
    prompts = torch.cat(asked)
    assert prompts.shape == (math.ceil(3 * 23 / 9), 2)
    assert (prompts[:, 0] == 0).all()
    text = [first + i for first in prompts[:, 1].tolist() for i in range(9)]
    assert torch.equal(found, cut(text[:69], 24))
    monkeypatch.undo()
    assert synthesize(stream_of(model), 2, 2, None, World(), Progress(), bos=0)[:, 0].tolist() == [0, 0]


def test_what_pruning_saw_of_the_text_that_heals(model: Path, path: Path, tmp_path: Path) -> None:
    """Windows of other lengths, which have that token each beside the text."""
    for bos in (True, False):
        read = Calibration(str(path), 8, 128, bos=bos)
        pruned = niwaki.prune(
            model, tmp_path / f"{bos}", 0.5, solver="magnitude", calibration=read, measurement=Measurement(samples=0)
        )
        heals = Calibration(str(path), order="first", bos=bos)
        assert _seen(heals, pruned.calibration, 32) == (math.ceil(8 * 127 / 31) if bos else 8 * 128 // 32)


@pytest.mark.parametrize("asked", [None, 0])
@pytest.mark.slow
def test_what_runs_have_it_write(model: Path, path: Path, tmp_path: Path, asked: int | None) -> None:
    """A run that prunes, one that heals: all that they train on begins as the text does."""
    seen: list[Tensor] = []

    def train(_: HealingRun, tokens: Tensor) -> None:
        seen.append(tokens)
        raise KeyboardInterrupt

    bos = asked is not None
    out, read = tmp_path / "out", Calibration(str(path), 4, 16, bos=bos)
    measured = Measurement(samples=0)
    written = "fast:synthetic=0.5"
    record = niwaki.prune(model, out, 0.5, solver="wanda", effort=written, calibration=read, measurement=measured)
    assert record.calibration["synthetic"] == 2
    given = Calibration(read_windows(str(path), load_tokenizer(model), 16, 4, bos=bos).tokens)
    own = synthesize(stream_of(model), 2, 16, None, World(), Progress(), bos=asked)
    joined = torch.cat([next(iter(given.texts)), own])  # type: ignore[list-item]
    niwaki.prune(model, tmp_path / "same", 0.5, solver="wanda", calibration=joined, measurement=measured)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "same" / "model.safetensors").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("niwaki.healing.whole.WholeRun._train", train)
        heals = Calibration(str(path), length=16, bos=bos)
        with pytest.raises(KeyboardInterrupt):
            niwaki.heal(out, tmp_path / "healed", model, tokens=320, calibration=heals, measurement=None)
    assert bool((seen[0][:, 0] == 0).all()) == bos


@pytest.mark.slow
def test_answers_begin_as_the_chat_template_says(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("niwaki.files.cached_assets_path", lambda *_: tmp_path / "kept")
    template = "<s>{% for message in messages %}{{ message['content'] }}{% endfor %}"
    edit_json(model / "tokenizer_config.json", chat_template=template)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why?"}')
    calibration = Calibration(str(prompts), samples=1, length=32, answers="own")
    (windows,) = with_answers(stream_of(model), calibration, None, World(), Progress()).texts
    assert isinstance(windows, niwaki.Windows)
    assert windows.tokens[0, 0] == 0
    assert windows.tokens[0, 1] != 0
    assert windows.bos == 0


def test_models_without_it_read_as_before(tmp_path: Path, path: Path) -> None:
    """Also with a token for it that the tokenizer does not put there."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(save_model_with_tokenizer(tmp_path / "plain"))
    assert tokenizer.bos_token
    both = [read_windows(str(path), tokenizer, 32, bos=bos) for bos in (True, False)]
    assert torch.equal(both[0].tokens, both[1].tokens)
