"""Removing tokens: any text can be encoded, what stays is as it was, and all files follow."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import niwaki
from niwaki import Calibration, Compute, Measurement, Prune, Record, Shrink, ShrinkVocabulary
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CalibrationError, CheckpointError, NiwakiError, UnsupportedModelError, UsageError
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.runs.stage import Stage
from niwaki.shrinking.tokenizer import TokenizerFile
from niwaki.shrinking.tokens import Size, choose, renumbered
from support.llama_cpp import LLAMA_CPP, ask
from support.models import edit_json, message, save_model_with_tokenizer, save_random
from support.runs import files
from support.small_tokenizers import KINDS, SPECIAL, TEXT, save_with_tokenizer, size, write_tokenizer

CPU = Compute("cpu", "float32")
#: Texts of all kinds, and pieces of what the tokenizers are from.
TEXTS = st.lists(st.sampled_from([*TEXT.split(), " ", "\n", "東京", "🌳", "مرحبا"]) | st.text(), max_size=12).map(
    "".join
)


@functools.cache
def _cut(kind: str, share: float = 0.8) -> tuple[Tokenizer, Tokenizer, dict[int, int]]:
    """A tokenizer, what is left of it when most tokens that can go are removed, and the numbers of these."""
    with tempfile.TemporaryDirectory() as place:
        file = TokenizerFile(write_tokenizer(Path(place), kind))
        whole = Tokenizer.from_file(str(Path(place) / "tokenizer.json"))
    counts = torch.zeros(size(kind))
    for number in whole.encode("the old river and the other men").ids:
        counts[number] += 1
    least = len({need for number in file.always for need in file.needs(number)})
    kept = choose(file, counts, Size(round(least + (1 - share) * (size(kind) - least))), ())
    new = dict(renumbered(kept))
    return whole, Tokenizer.from_str(json.dumps(file.without(new))), new


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=60)
def test_any_text(kind: str, text: str) -> None:
    """It is the same text, and where all of its tokens stay the same tokens."""
    whole, cut, new = _cut(kind)
    before, after = (each.encode(text, add_special_tokens=False).ids for each in (whole, cut))
    assert cut.decode(after, skip_special_tokens=False) == whole.decode(before, skip_special_tokens=False)
    if kind in ("bytes", "whole words"):
        assert cut.decode(after, skip_special_tokens=False) == text
    if all(number in new for number in before):
        assert after == [new[number] for number in before]


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_that_stays(kind: str) -> None:
    """Of the text of each, where it is one token, and of all pairs with some others."""
    whole, cut, new = _cut(kind, 0.5)
    same = 0
    for number in new:
        for other in sorted(new)[::7]:
            text = whole.decode([number, other], skip_special_tokens=False)
            before = whole.encode(text, add_special_tokens=False).ids
            if all(each in new for each in before):
                assert cut.encode(text, add_special_tokens=False).ids == [new[each] for each in before]
                same += before == [number, other]
    assert same > 100


@pytest.mark.parametrize("kind", KINDS)
def test_as_few_as_possible(kind: str) -> None:
    """Bytes alone are enough for any text, with what stands for a space."""
    whole, cut, _ = _cut(kind, 1.0)
    for text in (TEXT, "a b  c\n\td", "東京 🌳 مرحبا"):
        ids = cut.encode(text, add_special_tokens=False).ids
        assert cut.decode(ids) == whole.decode(whole.encode(text, add_special_tokens=False).ids) == text


def test_unknown_characters_cost_the_same(tmp_path: Path) -> None:
    """Which is more than the rarest token, so that one stays."""
    file = TokenizerFile(write_tokenizer(tmp_path / "model", "unigram"))
    pairs = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert min(range(len(pairs)), key=lambda number: pairs[number][1]) in file.always


def work(model: Path, out: Path, vocabulary: Any = 300, **options: Any) -> Record:
    text = model.parent / "text.txt"
    text.write_text(TEXT * 20)
    given: dict[str, Any] = {
        "calibration": Calibration(str(text), samples=4, length=32),
        "measurement": Measurement(samples=4),
        "compute": Compute("cpu"),
    }
    return niwaki.shrink(model, out, vocabulary=vocabulary, **{**given, **options})


def _logits(path: Path, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        values: Tensor = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits[0]
    return values


def _pairs(model: Path, out: Path) -> dict[int, int]:
    """By old numbers those that the same tokens have now."""
    old, new = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (model, out))
    return {old[token]: number for token, number in new.items()}


@pytest.mark.parametrize(
    ("kind", "case", "changes"),
    [("bytes", "llama tied", {}), ("fallback", "llama", {}), ("unigram", "llama", {}), ("whole words", "phi", {})],
    ids=["bytes, tied", "fallback", "unigram", "whole words, a head with biases"],
)
def test_the_same_logits(tmp_path: Path, kind: str, case: str, changes: dict[str, Any]) -> None:
    model = save_with_tokenizer(tmp_path / "model", kind, case, **changes)
    record = work(model, tmp_path / "out", size(kind) - 30)
    assert record.structure
    assert record.structure.vocabulary == {"before": size(kind) + 5, "after": size(kind) - 30}
    entries = Checkpoint(tmp_path / "out").entries.values()
    assert record.structure.parameters["after"] == sum(math.prod(entry.shape) for entry in entries)
    pairs = _pairs(model, tmp_path / "out")
    assert [pairs[number] for number in sorted(pairs)] == [*range(len(pairs))]  # the same order without gaps
    old, new = (AutoTokenizer.from_pretrained(path) for path in (model, tmp_path / "out"))
    tokens = old("".join(word for word in TEXT.split() if {*old(word).input_ids} <= {*pairs})).input_ids
    assert len(tokens) > 8
    assert {*tokens} <= {*pairs}
    assert new(old.decode(tokens[1:])).input_ids == [pairs[number] for number in tokens]
    before, after = _logits(model, tokens), _logits(tmp_path / "out", [pairs[number] for number in tokens])
    assert torch.equal(before[:, [*pairs]], after[:, [*pairs.values()]])
    assert after.shape[1] == len(pairs) == size(kind) - 30


def test_numbers_in_all_files(tmp_path: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model", "bytes")
    first = size("bytes") - len(SPECIAL)
    edit_json(model / "config.json", image_token_id=first + 2, pad_token_id=-1, bad_words_ids=[[65, first]])
    content = json.loads((model / "tokenizer.json").read_text())["model"]
    (model / "vocab.json").write_text(json.dumps(content["vocab"]))
    (model / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, content["merges"])]))
    (model / "added_tokens.json").write_text(json.dumps({token: first + i for i, token in enumerate(SPECIAL)}))
    (model / "tokenizer.model").write_bytes(b"all tokens")
    record = work(model, tmp_path / "out", 300)
    names = ("config.json", "generation_config.json")
    config, generation = (json.loads((tmp_path / "out" / name).read_text()) for name in names)
    assert (config["vocab_size"], config["image_token_id"], config["pad_token_id"]) == (300, 299, -1)
    assert (config["bos_token_id"], config["eos_token_id"]) == (297, 298)
    assert config["bad_words_ids"] == [[65, 297]]
    assert generation["eos_token_id"] == [298, 299]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer("a").input_ids[0]) == (297, 298, 297)
    numbers = dict(zip(SPECIAL, (297, 298, 299), strict=True))
    decoder = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {each["content"]: int(number) for number, each in decoder.items()} == numbers
    assert json.loads((tmp_path / "out" / "added_tokens.json").read_text()) == numbers
    written = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]
    assert json.loads((tmp_path / "out" / "vocab.json").read_text()) == written["vocab"]
    merges = (tmp_path / "out" / "merges.txt").read_text().splitlines()
    assert merges == ["#version: 0.2", *map(" ".join, written["merges"])]
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    assert any("tokenizer.model" in note for note in record.notes)


def test_tokens_without_a_row(tmp_path: Path) -> None:
    """The tokenizer may have more tokens than the model: those stay behind all others."""
    model = save_with_tokenizer(tmp_path / "model", "bytes", rows=-1, tie_word_embeddings=True)
    (model / "generation_config.json").unlink()
    record = work(model, tmp_path / "out", 300)
    assert record.structure
    assert record.structure.vocabulary == {"before": size("bytes") - 1, "after": 299}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<image>") == 299


@pytest.mark.parametrize(("times", "few"), [(1, True), (20, False)])
def test_few_tokens_to_count(tmp_path: Path, times: int, few: bool) -> None:
    """A text with little more tokens than the model has says little of which are rare, and a note says so."""
    model, text = save_with_tokenizer(tmp_path / "model", "bytes"), tmp_path / "some.txt"
    text.write_text(TEXT * times)
    given = {"calibration": Calibration(str(text), samples=1, length=16), "measurement": Measurement(samples=0)}
    record = work(model, tmp_path / "out", **given)
    assert any("little for a vocabulary of" in note and "as much text" in note for note in record.notes) == few


def test_bits_per_byte(tmp_path: Path) -> None:
    """Of the same bytes before and after, as summed up by transformers."""
    model = save_with_tokenizer(tmp_path / "model", "bytes")
    record = work(model, tmp_path / "out", 300)
    assert record.perplexity["before"].bytes == record.perplexity["after"].bytes
    windows = StreamedModel(Checkpoint(model)).tokenizer(TEXT * 20, add_special_tokens=False).input_ids
    for name, path in (("before", model), ("after", tmp_path / "out")):
        old, tokenizer = (AutoTokenizer.from_pretrained(each) for each in (model, path))
        nats, tokens, length = 0.0, 0, 0
        for i in range(4, 8):  # after those of the calibration
            text = str(old.decode(windows[31 * i : 31 * i + 31]))
            ids = tokenizer(text).input_ids
            loss = torch.log_softmax(_logits(path, ids), dim=-1)[:-1].gather(1, torch.tensor([ids[1:]]).T)
            nats, tokens, length = nats - loss.sum().item(), tokens + len(ids) - 1, length + len(text.encode())
        measured = record.perplexity[name]
        assert measured.tokens == tokens
        assert measured.bits == pytest.approx(nats / math.log(2) / length, rel=1e-5)
        assert measured.nats == pytest.approx(nats / tokens, rel=1e-5)
    difference = record.perplexity["after"].above(record.perplexity["before"])
    assert difference.unit == "bits a byte"
    assert difference.nats == pytest.approx(record.perplexity["after"].bits - record.perplexity["before"].bits)  # type: ignore[operator]
    assert any("do not compare" in note for note in record.notes)
    alone = niwaki.evaluate(tmp_path / "out", Measurement(str(tmp_path / "text.txt"), length=32, samples=2))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert sum(alone.bytes) == len(str(tokenizer.decode(ids[:62])).encode())
    assert "bits a byte" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("given", "size"), [(300, 300), ("300", 300), (0.2, 320), ("20 %", 320), ("used", 320), ("used:0.3", 320)]
)
def test_sizes(tmp_path: Path, given: Any, size: int) -> None:
    """Shares are of what is removed, and sizes that nobody named are multiples of 64."""
    file = TokenizerFile(write_tokenizer(tmp_path / "model", "bytes"))
    counts = torch.zeros(max(file.added.values()) + 1)
    counts[280:300] = torch.arange(20.0)
    kept = choose(file, counts, Size.of(given), [3])
    assert len(kept) == size
    assert {need for number in kept for need in file.needs(number)} == {*kept}
    assert {3, *file.added.values()} <= {*kept}
    if given == "used":
        assert {*range(281, 300)} <= {*kept}


def test_after_it_others(tmp_path: Path) -> None:
    """Stages that follow read the same text as the tokens that are left."""
    model = save_with_tokenizer(tmp_path / "model", "bytes", "llama grouped")
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    options: dict[str, Any] = {"calibration": Calibration(str(text), samples=4, length=32), "compute": CPU}
    stages: list[Stage | str] = [ShrinkVocabulary(300), Shrink(neurons=0.25), Prune(0.5, solver="wanda")]
    record = niwaki.run(model, tmp_path / "out", stages, measurement=Measurement(samples=4), **options)
    niwaki.run(model, tmp_path / "1", stages[:1], measurement=Measurement(samples=4), **options)
    niwaki.run(tmp_path / "1", tmp_path / "2", stages[1:], measurement=Measurement(samples=0), **options)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "2" / "tokenizer.json").read_bytes()
    for shard in sorted((tmp_path / "2").glob("*.safetensors")):
        assert (tmp_path / "out" / shard.name).read_bytes() == shard.read_bytes()
    assert record.structure
    assert record.structure.vocabulary == {"before": size("bytes") + 5, "after": 300}
    assert record.structure.parameters["before"] == sum(
        math.prod(entry.shape) for entry in Checkpoint(model).entries.values()
    )
    costs = [cost for _, cost in record.costs() if cost]
    assert [cost.unit for cost in costs] == 3 * ["bits a byte"]
    total = record.perplexity["after"].above(record.perplexity["before"])
    assert sum(cost.nats for cost in costs) == pytest.approx(total.nats)
    assert record.perplexity["after"].bytes == record.perplexity["before"].bytes


def test_refused(tmp_path: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model", "bytes")
    whole = size("bytes")

    def said(kind: type[NiwakiError], vocabulary: Any = 300, **options: Any) -> str:
        text = message(lambda: work(model, tmp_path / "out", vocabulary, **options), kind)
        assert not (tmp_path / "out").exists()
        return text

    assert "less than the 259 tokens" in said(UsageError, 200)
    assert f"none of the {whole:,}" in said(UsageError, whole)
    for wrong in (0, 1, "abc", -5, "used:1.5", "100 %", "used:0", 1.5, "nan", "used:nan"):
        said(UsageError, wrong)
    effort: dict[str, Any] = {"effort": "balanced"}
    assert "balanced has none; give best" in said(UsageError, 300, **effort)
    short = tmp_path / "short.txt"
    short.write_text("the river")
    assert "too short" in said(CalibrationError, calibration=str(short))
    edit_json(model / "config.json", vocab_size_per_layer_input=64)
    assert "vocab_size_per_layer_input" in said(UnsupportedModelError)
    edit_json(model / "config.json", vocab_size_per_layer_input=..., image_token_id=5000)
    assert "5,000" in said(CheckpointError)
    for changes, expected in (
        ({"type": "WordPiece", "merges": ..., "unk_token": "a"}, "WordPiece"),
        ({"dropout": 0.1}, "dropout"),
        ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
        ({"vocab": {"a": "b"}}, "not a tokenizer"),
    ):
        content = json.loads((model / "tokenizer.json").read_text())
        for name, value in changes.items():
            content["model"].pop(name, None)
            if value is not ...:
                content["model"][name] = value
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(NiwakiError, match=expected):
            TokenizerFile(tmp_path / "other")


def test_an_encoder_without_a_head(tmp_path: Path) -> None:
    """As multilingual-e5: measured by its sentence vectors, of the same sentences as the tokens that are left."""
    first = size("unigram") - len(SPECIAL)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    ids = {"bos_token_id": first, "eos_token_id": first + 1, "pad_token_id": 1, "max_position_embeddings": 130}
    config = AutoConfig.for_model("xlm-roberta", vocab_size=size("unigram"), **sizes, **ids)
    model = write_tokenizer(save_random(tmp_path / "model", config, AutoModel), "unigram")
    text = tmp_path / "text.txt"
    text.write_text("the other men sat by the river in 1984. " * 200)
    stages: list[Stage] = [ShrinkVocabulary(size("unigram") - 20), Prune(0.25, solver="wanda")]
    given: dict[str, Any] = {"calibration": Calibration(str(text), samples=4, length=32), "compute": CPU}
    record = niwaki.run(model, tmp_path / "out", stages[:1], **given)
    assert record.perplexity == {}
    assert record.vectors["after"].cosine == pytest.approx(1, abs=1e-5)
    pairs = _pairs(model, tmp_path / "out")
    assert len(pairs) == size("unigram") - 20
    old, new = (AutoTokenizer.from_pretrained(path) for path in (model, tmp_path / "out"))
    tokens = old("the other men sat by the river").input_ids
    assert new("the other men sat by the river").input_ids == [pairs[number] for number in tokens]
    with torch.no_grad():
        before, after = (
            AutoModel.from_pretrained(path)(torch.tensor([ids])).last_hidden_state
            for path, ids in ((model, tokens), (tmp_path / "out", [pairs[number] for number in tokens]))
        )
    assert torch.equal(before, after)
    assert 0 < niwaki.run(model, tmp_path / "both", stages, **given).vectors["after"].cosine < 1


def test_other_tensors_of_words(tmp_path: Path) -> None:
    """A tensor that has a row for each token, and is neither embedding nor head, could be anything."""
    model = save_with_tokenizer(tmp_path / "model", "bytes", intermediate_size=size("bytes") + 5)
    assert "mlp.down_proj.weight" in message(lambda: work(model, tmp_path / "out"), UnsupportedModelError)


def test_order() -> None:
    for stages in ([Prune(0.5), ShrinkVocabulary(300)], [Shrink(blocks=1), ShrinkVocabulary(300)]):
        message(lambda stages=stages: niwaki.run("demo", "nowhere", stages))  # type: ignore[misc]


@pytest.mark.slow
def test_stopped_anywhere(tmp_path: Path) -> None:
    class Stop(Progress):
        def __init__(self, number: int) -> None:
            self.left = number

        def stage(self, block: int, name: str, steps: int) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    model = save_with_tokenizer(tmp_path / "model", "bytes")
    options = {"neurons": 0.25, "measurement": Measurement(samples=2)}
    work(model, tmp_path / "whole", **options)
    expected = files(tmp_path / "whole")
    stopped = 0
    for number in range(1, 14, 3):
        try:
            work(model, tmp_path / "out", **options, progress=Stop(number))
        except KeyboardInterrupt:
            stopped += 1
            work(model, tmp_path / "out", **options)
        assert files(tmp_path / "out") == expected
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()
    assert stopped > 2


@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not there")
@pytest.mark.slow
def test_llama_cpp_encodes_alike(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = save_model_with_tokenizer(tmp_path / "model")
    few = Calibration("demo", samples=4, length=64)
    niwaki.shrink(model, tmp_path / "out", vocabulary=2048, calibration=few, measurement=None)
    niwaki.export(tmp_path / "out", tmp_path / "model.gguf", "gguf-q8_0")
    texts = [TEXT, "The old man's river; 東京 🌳 مرحبا\n\n\tx = 1984", "unforgettable circumstances"]
    (answer,) = ask(tmp_path, [(tmp_path / "model.gguf", texts, [1, 2, 3])])
    assert not answer.error
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert answer.split == [tokenizer(text).input_ids for text in texts]
