"""Healing where tokens were removed: the dense model's predictions, in the tokens that are left."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import niwaki
from niwaki import Calibration, Compute, Heal, Measurement, ShrinkVocabulary
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.healing.translation import Translation
from niwaki.records.progress import Progress
from niwaki.records.record import HealingRecord
from niwaki.runs.stage import Stage
from niwaki.shrinking.tokenizer import TokenizerFile
from niwaki.shrinking.tokens import Size, choose, renumbered
from support.covering import some
from support.healing import curve, healing_of
from support.models import message
from support.runs import files
from support.small_tokenizers import KINDS, TEXT, save_with_tokenizer, size, write_tokenizer

CPU = Compute("cpu", "float32")


@cache
def _both(kind: str) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase, int]:
    """A tokenizer, what is left of it when half of what can go is removed, and how many tokens that has."""
    with tempfile.TemporaryDirectory() as place:
        file = TokenizerFile(write_tokenizer(Path(place) / "whole", kind))
        counts = torch.zeros(size(kind) + 5)
        counts[: size(kind)] = 1
        least = len({need for number in file.always for need in file.needs(number)})
        new = renumbered(choose(file, counts, Size((least + size(kind)) // 2), ()))
        (Path(place) / "cut").mkdir()
        for name in (path.name for path in (Path(place) / "whole").iterdir() if path.name != "tokenizer.json"):
            (Path(place) / "cut" / name).write_bytes((Path(place) / "whole" / name).read_bytes())
        (Path(place) / "cut" / "tokenizer.json").write_text(json.dumps(file.without(new)))
        one, other = (AutoTokenizer.from_pretrained(Path(place) / name) for name in ("whole", "cut"))
    return one, other, len(new)


def _translation(kind: str) -> Translation:
    one, other, left = _both(kind)
    return Translation(one, other, (len(one), left))


def _pieces(kind: str, number: int) -> tuple[int, ...]:
    """Of one token, as the tokenizer library makes them of its text."""
    one, other, _ = _both(kind)
    token, known = one.convert_ids_to_tokens(number), other.get_vocab()
    if token in known:
        return (known[token],)
    return tuple(each.id for each in other.backend_tokenizer.model.tokenize(token))


@pytest.mark.parametrize("kind", KINDS)
def test_windows(kind: str) -> None:
    """The same text, and every place knows which prediction of the dense model is about it."""
    one, *_ = _both(kind)
    ids = one(TEXT * 2, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    made, at, beginnings = _translation(kind).windows(tokens)
    assert made.shape == tokens.shape
    assert bool((beginnings > 0).any())
    for window, own, places, begun in zip(*(each.tolist() for each in (tokens, made, at, beginnings)), strict=True):
        whole = [piece for number in window for piece in _pieces(kind, number)]
        first = len(_pieces(kind, window[0])) - 1  # nothing predicts these
        assert own == whole[first : first + 16]
        for i, (place, beginning) in enumerate(zip(places, begun, strict=True)):
            before = [piece for number in window[: place + 1] for piece in _pieces(kind, number)][first:]
            if beginning == 0:
                assert own[: i + 1] == before
            else:  # within the next token
                there = own[len(before) : i + 1]
                assert there == [*_pieces(kind, window[place + 1])[: len(there)]]
                assert 0 < len(there) < len(_pieces(kind, window[place + 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_predictions(kind: str) -> None:
    """Of every piece: how probable the tokens are that begin with it, after the pieces that are there."""
    one, _, left = _both(kind)
    translation = _translation(kind)
    tokens = torch.tensor(one(TEXT, add_special_tokens=False)["input_ids"])[None]
    made, _, beginnings = (part[0] for part in translation.windows(tokens))
    inner = beginnings.nonzero().flatten()[:5].tolist()
    assert inner
    logits = torch.randn(len(inner) + 1, len(one), generator=torch.Generator().manual_seed(0)).mul_(3)
    p = logits.double().softmax(1)
    found = translation.predictions(logits, torch.tensor([0, *(int(beginnings[i]) for i in inner)])).double().exp()
    there = [()] + [tuple(made[_begin(beginnings.tolist(), i) : i + 1].tolist()) for i in inner]
    for row, pieces in enumerate(there):
        expected = defaultdict[int, float](float)
        for number in range(len(one)):
            whole = _pieces(kind, number)
            if whole[: len(pieces)] == pieces and len(whole) > len(pieces) and (len(whole) > 1 or not pieces):
                expected[whole[len(pieces)]] += float(p[row, number])
        total = sum(expected.values())
        for piece in range(left):
            assert float(found[row, piece]) == pytest.approx(expected[piece] / total, rel=1e-4, abs=1e-8)
    assert torch.allclose(found.sum(1), torch.ones(len(found), dtype=torch.float64), atol=1e-5)


def _begin(beginnings: list[int], place: int) -> int:
    """Where the token begins that ``place`` is within."""
    return max(i for i in range(place + 1) if not beginnings[i - 1] or i == 0)


def _text(place: Path, name: str = "text") -> Path:
    """A file; that which is called "held" is measured on."""
    file = place / f"{name}.txt"
    file.write_text(("" if name == "text" else "The men of the river, and others. ") + TEXT * 40)
    return file


def _options(place: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "calibration": Calibration(str(_text(place)), length=32),
        "measurement": Measurement(str(_text(place, "held")), samples=4),
        "compute": CPU,
    }
    return given | changes


def _cut(place: Path, kind: str = "bytes", count: int | None = None) -> tuple[Path, Path]:
    """A model and what is left of it, with few tokens."""
    model = save_with_tokenizer(place / "model", kind)
    options = _options(place, calibration=Calibration(str(_text(place)), samples=4, length=32))
    niwaki.shrink(model, place / "cut", vocabulary=count or size(kind) - 40, **options)
    return model, place / "cut"


@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_it_comes_nearer(tmp_path: Path, kind: str) -> None:
    """To the dense model, on text that was held out; bytes are measured, as tokens differ."""
    model, cut = _cut(tmp_path, kind, 290 if kind in ("bytes", "whole words") else None)
    options = _options(tmp_path)
    record = niwaki.heal(cut, tmp_path / "out", model, tokens=4096, batch=64, rate=0.005, own_text=0.5, **options)
    points, best = curve(record)
    assert min(point.error for point in points) < points[0].error
    assert best is not points[0]
    perplexity = record.perplexity
    assert perplexity["before"].bytes == perplexity["pruned"].bytes == perplexity["after"].bytes
    assert perplexity["before"].tokens < perplexity["after"].tokens
    keys = {"model.embed_tokens.weight", "lm_head.weight"}
    for key in keys & Checkpoint(cut).entries.keys():
        assert torch.equal(Checkpoint(cut).read(key), Checkpoint(tmp_path / "out").read(key))


def test_in_one_run(tmp_path: Path) -> None:
    """As stages, as an effort, and after what else is done: the same text is measured on."""
    model = save_with_tokenizer(tmp_path / "model", "bytes")
    options = _options(tmp_path, calibration=Calibration(str(_text(tmp_path)), samples=4, length=32))
    stages: list[Stage | str] = [ShrinkVocabulary(size("bytes") - 40), Heal(tokens=512, batch=64)]
    record = niwaki.run(model, tmp_path / "out", stages, **options)
    assert healing_of(record)
    assert record.structure
    assert record.structure.vocabulary["after"] == size("bytes") - 40
    assert {*record.perplexity} == {"before", "pruned", "after"}
    assert len({each.bytes for each in record.perplexity.values()}) == 1
    cut = size("bytes") - 40
    record = niwaki.shrink(model, tmp_path / "short", vocabulary=cut, effort="fast:healing=2", **options)
    assert healing_of(record).tokens == 2 * 4 * 32
    stages = [ShrinkVocabulary(cut), niwaki.Prune(0.5, effort="fast"), Heal(tokens=256, batch=64)]
    record = niwaki.run(model, tmp_path / "pruned", stages, **options)
    assert record.sparsity == pytest.approx(0.5, abs=0.01)
    assert record.healing


class Stop(Progress):
    """Stops at a point."""

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        if len(record.points) == 3:
            raise KeyboardInterrupt


def test_stopped_and_again(tmp_path: Path) -> None:
    """The same bytes."""
    model, cut = _cut(tmp_path)
    options = _options(tmp_path) | {"tokens": 1024, "batch": 64}
    niwaki.heal(cut, tmp_path / "whole", model, **options)
    with pytest.raises(KeyboardInterrupt):
        niwaki.heal(cut, tmp_path / "out", model, progress=Stop(), **options)
    assert niwaki.heal(cut, tmp_path / "out", model, **options).resumed
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_refused(tmp_path: Path) -> None:
    model, cut = _cut(tmp_path)
    options, out = _options(tmp_path), tmp_path / "out"
    text = message(lambda: niwaki.heal(cut, out, model, method="blocks", **options), UnsupportedModelError)
    assert "can only be healed as a whole" in text
    text = message(lambda: niwaki.heal(model, out, cut, **options), UsageError)
    assert "give the model that it was pruned from" in text
    other = save_with_tokenizer(tmp_path / "other", "unigram")
    text = message(lambda: niwaki.heal(cut, out, other, **options), UsageError)
    assert "tokens and" in text or "another" in text
    cut_size = size("bytes") - 40
    assert "balanced has none; give best" in message(lambda: ShrinkVocabulary(cut_size, "balanced"), UsageError)
    stages: list[Stage | str] = [ShrinkVocabulary(cut_size), Heal("blocks", tokens=64)]
    assert "same tokens" in message(lambda: niwaki.run(model, out, stages, **options), UsageError)
    assert not out.exists()
