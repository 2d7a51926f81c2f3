"""From text to windows of tokens; the whole text tokenized at once is the judge."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import os
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase

from niwaki.errors import CalibrationError, NiwakiError, UnknownNameError, UsageError
from niwaki.models import tokens
from niwaki.models.tokens import load_tokenizer
from niwaki.options import Calibration, Measurement
from niwaki.texts import files as text_files, sources as text_sources, texts as calibration
from niwaki.texts.sources import EXCERPTS
from niwaki.texts.texts import Texts, read_heldout, read_windows, usual_size
from support.models import EMBEDDED, edit_json, message, save_model_with_tokenizer
from support.streams import stream_of


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(EMBEDDED)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def prose(words: int, seed: int = 0) -> str:
    """Words of all sorts; each of them only once, so that a stretch of it has one place."""
    generator = random.Random(seed)
    parts = []
    for number in range(words):
        word = generator.choice(["gentleman", "the", "naïve", "x", "CHAPTER", "日本", "don't", "--", "🙂"])
        parts.append(f"{word}{number:05d}" + generator.choice([" ", " ", " ", ", ", "\n", "\n\n", "  ", ". "]))
    return "".join(parts)


@pytest.fixture(scope="module")
def text() -> str:
    return prose(3000)


@pytest.fixture
def path(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


def refused(
    source: Path | str,
    tokenizer: Any,
    length: int = 16,
    count: int | None = 8,
    kind: type[NiwakiError] = CalibrationError,
    **options: Any,
) -> str:
    """What is said where windows of a text cannot be had."""
    return message(lambda: read_windows(str(source), tokenizer, length, count, **options), kind)


# The first windows


def test_first_windows_are_the_start_of_the_text(path: Path, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    windows = read_windows(str(path), tokenizer, 32, 9)
    assert windows.tokens.shape == (9, 32)
    assert windows.tokens.dtype == torch.int64
    assert windows.tokens.flatten().tolist() == encode(tokenizer, text)[: 9 * 32]
    assert (windows.source, windows.order) == (str(path), "first")


@pytest.mark.parametrize("guess", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 40, 150])
@pytest.mark.slow
def test_the_same_when_the_text_is_read_in_rounds(
    path: Path, text: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, guess: int, count: int
) -> None:
    encoded = []
    real = tokens.encode

    def count_rounds(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        encoded.append(len(text))
        return real(tokenizer, text)

    monkeypatch.setattr(calibration, "encode", count_rounds)
    monkeypatch.setattr(text_files, "_PIECE", 97)
    monkeypatch.setattr(calibration, "_CHARACTERS_PER_TOKEN", guess)
    windows = read_windows(str(path), tokenizer, 41, count)
    assert windows.tokens.flatten().tolist() == encode(tokenizer, text)[: 41 * count]
    assert guess > 1 or len(encoded) > 1  # the text has more than 2 characters a token
    # Not all of the text is read where a part of it is enough.
    assert count > 2 or encoded[-1] < len(text) / 4


def test_the_first_guess_may_cut_a_token(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tokens of three characters, but for the first, of four: each guess ends inside the last token.
    monkeypatch.setattr(calibration, "_CHARACTERS_PER_TOKEN", 3)
    text = "that" + " of to in is it as at be by he" * 20
    expected = encode(tokenizer, text)
    assert len(expected) == 201
    for count in range(3, 180):
        cut = encode(tokenizer, text[: 3 * count])
        assert len(cut) >= count
        assert cut[:count] != expected[:count]
        assert calibration._first_tokens(iter([text]), tokenizer, count) == expected[:count]


@pytest.mark.parametrize(("at_once", "overlap"), [(777, 300), (3001, 1000), (60_000, 700)])
@pytest.mark.slow
def test_long_texts_become_tokens_in_parts(
    text: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, at_once: int, overlap: int
) -> None:
    """The same tokens as at once, also of characters that are several tokens, and of text without a word."""
    emoji = "".join(chr(0x1F300 + n % 700) + "é日" * (n % 3) for n in range(3000))
    blanks = [" " * 9000 + text[:5000], text[:5000] + "\n" * 4000 + text[5000:9000]]
    texts = [text, emoji, "x" * 9000, "ab" * 5000, *blanks]
    whole = [encode(tokenizer, each) for each in texts]
    monkeypatch.setattr(tokens, "_AT_ONCE", at_once)
    monkeypatch.setattr(tokens, "_OVERLAP", overlap)
    assert [encode(tokenizer, each) for each in texts] == whole


def test_spare_windows_are_welcome_and_not_needed(path: Path, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    whole = len(encode(tokenizer, text)) // 100
    assert len(read_windows(str(path), tokenizer, 100, whole - 2, spare=1).tokens) == whole - 1
    assert len(read_windows(str(path), tokenizer, 100, whole - 2, spare=50).tokens) == whole
    assert len(read_windows(str(path), tokenizer, 100, whole, spare=50).tokens) == whole


def test_all_of_the_text(path: Path, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = encode(tokenizer, text)
    windows = read_windows(str(path), tokenizer, 64)
    assert windows.tokens.flatten().tolist() == ids[: len(ids) // 64 * 64]
    assert windows.origin.endswith(f"; all windows, {len(ids) % 64} tokens after them left out")
    assert len(ids) % 64


def test_a_text_that_is_too_short(path: Path, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    total = len(encode(tokenizer, text))
    count = total // 50 + 3
    said = refused(path, tokenizer, 50, count)
    assert f"{count} windows of 50 tokens need {50 * count} tokens" in said
    assert f"it has {total}, {50 * count - total} are missing" in said
    # One token more or less decides.
    assert len(read_windows(str(path), tokenizer, total, 1).tokens) == 1
    assert ", 1 are missing" in refused(path, tokenizer, total + 1, 1)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_an_empty_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    for count in (2, None):
        assert f"it has 0, {16 * (count or 1)} are missing" in refused(path, tokenizer, 16, count)


@pytest.mark.parametrize(("length", "count"), [(0, 1), (1, 1), (-5, 1), (16, 0), (16, -1)])
def test_lengths_and_counts(path: Path, tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> None:
    assert str(length) in refused(path, tokenizer, length, count, UsageError)


def test_fingerprints(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first, again, other = (read_windows(str(path), tokenizer, n, 4).fingerprint() for n in (16, 16, 17))
    assert first == again != other
    assert re.fullmatch("[0-9a-f]{64}", first)


# Kinds of files


def as_jsonl(texts: Iterable[str]) -> str:
    return "".join(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(texts))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for name, raw in (("a.txt", "a b c d e f"), ("a.jsonl", '{"text": "a b c d e f"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + raw.encode())
        windows = read_windows(str(tmp_path / name), tokenizer, 4, 1)
        assert windows.tokens.flatten().tolist() == encode(tokenizer, "a b c d")[:4]


def test_only_jsonl_is_described_as_such(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for name, joined in (("a.json.txt", False), ("a.jsonl", True), ("a.json.gz", True), ("a.jsonl.md", False)):
        raw = b'{"text": "a b c d e f"}'
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        windows = read_windows(str(tmp_path / name), tokenizer, 4, 1)
        assert ("texts joined" in windows.origin) == joined
        text = "a b c d e f" if joined else raw.decode()
        assert windows.tokens.flatten().tolist() == encode(tokenizer, text)[:4]


@pytest.mark.parametrize("name", EXCERPTS)
@pytest.mark.slow
def test_excerpts_ship_with_niwaki(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lzma.decompress((EMBEDDED.parent / EXCERPTS[name]).read_bytes()).decode()
    windows = read_windows(name, tokenizer, 256, 100)
    assert windows.tokens.flatten().tolist() == encode(tokenizer, whole)[:25600]
    assert windows.source == name
    # A file of that name in the current directory comes first, a directory does not.
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    assert read_windows(name, tokenizer, 256, 100).fingerprint() == windows.fingerprint()
    Path(name).rmdir()
    Path(name).write_text("a b c d e f g h")
    own = read_windows(name, tokenizer, 4, 1).tokens
    assert own.flatten().tolist() == encode(tokenizer, "a b c d")[:4]


@pytest.mark.parametrize(
    "line",
    [
        *("{", '["text", {"text": "x"}]', "7", "null", '{"content": "x"}', '{"text": null}', '{"text": 7}'),
        *('{"text": ["x"]}', '{"text": "\\ud83d"}', '{"text": "x", "n": ' + "9" * 5000 + "}"),
        *('{"text": ' + "[" * 100_000, '{"text": "' + "x" * 1000 + '"}'),
    ],
    ids=lambda line: line[:20],
)
def test_bad_jsonl(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    if "xxx" in line:
        monkeypatch.setattr(text_files, "_LONGEST", 1000)
    path = tmp_path / "a.jsonl"
    for number, before in ((1, ""), (2, '{"text": "good"}\n')):
        path.write_text(f"{before}{line}\n")
        if line[0] == "[" and not before:
            continue  # a list is a file of its own
        said = refused(path, tokenizer)
        assert f"{path}, line {number}" in said
        assert "'text'" in said or "longer than 1,000" in said or "not a JSON object: " in said


def test_files_that_are_not_there(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    long, nul = f"{tmp_path}/{'a' * 300}", f"{tmp_path}/a\0"
    for source in (str(tmp_path / "a"), "./a", "~/no/such/file", "~nobody/a", "a.txt", "a.jsonl.gz", long, nul):
        said = refused(source, tokenizer, kind=NiwakiError)
        assert f"there is no file {source}" in said or "cannot be used as a path" in said


@pytest.mark.skipif(sys.platform == "win32", reason="has neither")
def test_what_could_be_read_for_ever(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (str(tmp_path / "pipe"), "/dev/zero"):
        assert f"{source} is a pipe or a device" in refused(source, tokenizer)


def test_a_text_that_is_too_long_to_take_all_of(
    path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_LONGEST", 1000)
    assert "say how many samples" in refused(path, tokenizer, count=None)
    assert len(read_windows(str(path), tokenizer, 16, 100).tokens) == 100


# Random windows


def places(windows: torch.Tensor, text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    """Where each window is in the text."""
    found = []
    for window in windows:
        # A window may end inside a character; it never begins in one.
        part = str(tokenizer.decode(window, clean_up_tokenization_spaces=False)).rstrip("\ufffd")
        assert text.count(part) == 1
        start = text.index(part)
        found.append((start, start + len(part)))
    return found


def test_random_windows_are_pieces_of_the_text(path: Path, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    windows = read_windows(str(path), tokenizer, 24, 12, order="random", seed=1)
    assert windows.tokens.shape == (12, 24)
    assert windows.order == "random"
    found = places(windows.tokens, text, tokenizer)
    ordered = sorted(found)
    assert ordered != found  # shuffled
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))  # none overlap
    assert all(start == 0 or text[start - 1] == " " for start, _ in found)  # no cut words
    assert ordered[0][0] < len(text) / 3 < 2 * len(text) / 3 < ordered[-1][1]  # from all over the text


def test_the_seed_decides(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    runs = [read_windows(str(path), tokenizer, 24, 12, order="random", seed=s).tokens for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 1.1])
@pytest.mark.slow
def test_random_windows_of_a_text_that_is_short(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, share: float
) -> None:
    text = lzma.decompress((EMBEDDED.parent / EXCERPTS["demo"]).read_bytes()).decode()[:50_000]
    path = tmp_path / "a.txt"
    path.write_text(text)
    total = len(encode(tokenizer, text))
    count = int(share * total / 64)
    if share > 1:
        assert f"only {total // 64} random windows" in refused(path, tokenizer, 64, count, order="random")
    else:
        windows = read_windows(str(path), tokenizer, 64, count, order="random").tokens
        assert len(windows) == len(windows.unique(dim=0)) == count


def test_random_windows_of_the_first_part_of_a_long_text(
    path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said which part that is."""
    assert not read_windows(str(path), tokenizer, 8, 4, order="random").notes
    monkeypatch.setattr("niwaki.texts.texts._LONGEST", 3000)
    monkeypatch.setattr("niwaki.texts.files._PIECE", 500)
    windows = read_windows(str(path), tokenizer, 24, 4, order="random")
    (note,) = windows.notes
    assert f"the first 3,000 characters of {path}" in note
    assert all(end <= 3000 for _, end in places(windows.tokens, path.read_text(), tokenizer))
    assert "characters" not in "".join(read_windows(str(path), tokenizer, 8, 4).notes)


# Data sets


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of ``datasets.load_dataset``, which is not left to look for anything."""
    import datasets

    calls: list[tuple[Any, ...]] = []
    wrong: dict[str, list[dict[str, Any]]] = {
        "no/text": [{"sentence": "x", "label": "y"}],
        "no/rows": [],
        "bad/rows": [{"text": "x"}, {"text": None}],
        "bad/first": [{"text": 5}],
    }

    def load(name: str, configuration: str | None, **others: Any) -> Iterable[dict[str, Any]]:
        calls.append((name, configuration, others))
        if name in wrong:
            return wrong[name]
        field = "sentence" if name == "ptb-text-only/ptb_text_only" else "text"
        return ({field: f"document {n} of the data set"} for n in range(10**9))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("niwaki.texts.sources.refusal", lambda *_: None)
    return calls


def test_named_data_sets_are_streamed(tokenizer: PreTrainedTokenizerBase, loaded: list[tuple[Any, ...]]) -> None:
    for order in ("first", "random"):
        for source in ("c4", "wikitext2", "wikitext2-train", "me/mine", "me/mine:part", "me/mine:part:valid"):
            # The data set has a thousand million rows: this ends only where it is read as a stream.
            windows = read_windows(source, tokenizer, 16, 8, order=order)
            assert windows.tokens.shape == (8, 16)
    assert all(others["streaming"] is True for _, _, others in loaded)
    asked = [(name, configuration, others["split"]) for name, configuration, others in loaded]
    assert asked == 2 * [
        ("allenai/c4", None, "train"),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
        ("me/mine", None, "train"),
        ("me/mine", "part", "train"),
        ("me/mine", "part", "valid"),
    ]
    # The files of a split go by its name: otherwise all are its "train".
    files = [others["data_files"] for *_, others in loaded[:2]]
    assert files == [{"train": "en/c4-train.00000-of-01024.json.gz"}, None]
    documents = "\n\n".join(f"document {n} of the data set" for n in range(100))
    windows = read_windows("me/mine", tokenizer, 16, 8)
    assert windows.tokens.flatten().tolist() == encode(tokenizer, documents)[:128]


def test_names_of_no_data_set(tokenizer: PreTrainedTokenizerBase, loaded: list[Any]) -> None:
    hints = {"c5": "did you mean c4", "nosuch": "give a file, or a data set as OWNER/NAME", "a b": "a b"}
    for source, hint in hints.items():
        assert hint in refused(source, tokenizer, kind=UnknownNameError)
    assert not loaded


def test_a_directory_that_is_no_data_set(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "_MOST_FILES", 2)
    for number in range(3):
        (tmp_path / f"{number}.txt").touch()
    assert "more than 2 files" in refused(tmp_path, tokenizer)
    assert not loaded


def test_data_sets_of_the_wrong_kind(tokenizer: PreTrainedTokenizerBase, loaded: list[Any]) -> None:
    said = refused("no/text", tokenizer)
    assert "no column 'text'" in said
    assert "only 'sentence', 'label'" in said
    assert "it has 0, 128 are missing" in refused("no/rows", tokenizer)
    for name in ("bad/rows", "bad/first"):
        said = refused(name, tokenizer)
        assert f"{name}, row {1 + (name == 'bad/rows')}: not an object with a field 'text' that is text" in said
    assert len(loaded) == 4


def test_a_directory_is_a_data_set(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "a.jsonl").write_text(as_jsonl([text[:400], text[400:900]]))
    (directory / "b.jsonl").write_text(as_jsonl([text[900:2000]]))
    joined = "\n\n".join([text[:400], text[400:900], text[900:2000]])
    ids = encode(tokenizer, joined)
    monkeypatch.chdir(tmp_path)
    for source in (str(directory), "data", "./data"):
        windows = read_windows(source, tokenizer, 10)
        assert windows.tokens.flatten().tolist() == ids[: len(ids) // 10 * 10]


def test_without_the_extra(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source, said in (
        ("c4", "the data set c4 (the default of --calibration) needs an extra"),
        ("ptb", "the data set ptb needs an extra"),
        ("me/mine", "me/mine is not a file, and data sets need an extra"),
    ):
        told = refused(source, tokenizer)
        assert said in told
        assert "pip install datasets" in told


@pytest.mark.parametrize(
    "error", [ConnectionError("no route\nto the hub"), ValueError(""), RuntimeError("x"), OSError(28, "full")]
)
def test_a_hub_that_cannot_be_reached(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    import datasets

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr("niwaki.texts.sources.refusal", lambda *_: None)
    said = refused("ptb", tokenizer)
    assert "the data set ptb is not available" in said
    assert (str(error).splitlines() or [type(error).__name__])[0] in said
    assert "--calibration demo, --text demo-held" in said  # what to do instead
    # Nobody has to have named these.
    for source, option in (("c4", "the default of --calibration"), ("wikitext2", "the default of --text")):
        assert option in refused(source, tokenizer)


READ_TIMEOUT = type("ReadTimeout", (Exception,), {})()  # as httpx has one, for a hub that is slow


@pytest.mark.parametrize(("answer", "waits"), [(ConnectionError(), False), (READ_TIMEOUT, True), (None, True)])
def test_nobody_waits_for_a_hub_that_is_not_there(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, answer: Exception | None, waits: bool
) -> None:
    """The library would ask again for half a minute; what is in its cache is found all the same."""
    import datasets

    asks: list[bool] = []

    def load(*_: object, **__: object) -> Iterable[dict[str, str]]:
        asks.append(not datasets.config.HF_HUB_OFFLINE)
        return ({"text": f"document {n}"} for n in range(100))

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("niwaki.texts.sources.refusal", lambda *_: answer)
    read_windows("c4", tokenizer, 16, 2)
    assert asks == [waits]
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_texts_of_the_papers(tokenizer: PreTrainedTokenizerBase, loaded: list[tuple[Any, ...]]) -> None:
    """C4's 1,100 first documents with blanks between them, in 256 windows at most; Penn Treebank's sentences."""
    documents = " ".join(f"document {n} of the data set" for n in range(1100))
    ids = encode(tokenizer, documents)
    short, long = (read_windows("c4-validation", tokenizer, length) for length in (16, 64))
    assert short.tokens.flatten().tolist() == ids[: 256 * 16]
    assert short.origin.endswith(f"; first windows, {len(ids) - 256 * 16:,} tokens after them left out")
    assert len(long.tokens) == len(ids) // 64 < 256
    assert read_windows("c4-validation", tokenizer, 16, 2).tokens.flatten().tolist() == ids[:32]
    assert read_windows("ptb", tokenizer, 16, 8).tokens.flatten().tolist() == ids[: 16 * 8]
    assert [(name, others["split"]) for name, _, others in loaded[2:]] == [
        ("allenai/c4", "validation"),
        ("ptb-text-only/ptb_text_only", "test"),
    ]
    assert loaded[0][2]["data_files"] == {"validation": "en/c4-validation.00000-of-00008.json.gz"}
    assert loaded[-1][2]["revision"] == "refs/convert/parquet"


def test_where_windows_come_from(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, loaded: list[tuple[Any, ...]]
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} of the file"}) + "\n" for n in range(50)))
    ids = encode(tokenizer, "\n\n".join(f"document {n} of the file" for n in range(50)))
    whole = read_windows(str(path), tokenizer, 16)
    tail = "one text, no special tokens (no BOS)"
    assert whole.origin == (
        f"{path}, texts joined by '\\n\\n'; {tail}; all windows, {len(ids) % 16} tokens after them left out"
    )
    random = read_windows("demo", tokenizer, 16, 2, order="random")
    assert random.origin == f"the excerpt demo that ships with niwaki; {tail}; random windows"
    first = read_windows("c4-validation", tokenizer, 16)
    excess = len(encode(tokenizer, " ".join(f"document {n} of the data set" for n in range(1100)))) - 256 * 16
    assert first.origin == (
        "allenai/c4, split validation, en/c4-validation.00000-of-00008.json.gz, first 1,100 rows joined by ' '; "
        f"{tail}; first windows, {excess:,} tokens after them left out"
    )
    wiki = read_windows("wikitext2", tokenizer, 16, 1).origin
    assert wiki.startswith("Salesforce/wikitext, wikitext-2-raw-v1, split test, rows joined by '\\n\\n'; ")


# Tokenizers

SPACED = "Seven  words of 1234 texts,\n\tnot more."


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    said = message(lambda: load_tokenizer(tmp_path), CalibrationError)
    assert f"{tmp_path} has no tokenizer that can be loaded: neither tokenizer.json nor" in said
    assert said.endswith("; is the download complete?")


@pytest.mark.parametrize("raw", ["", "{", "[]", '{"version": "1.0"}'])
def test_a_broken_tokenizer(tmp_path: Path, raw: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (tmp_path / "tokenizer.json").write_text(raw)
    assert f"{tmp_path} has no tokenizer" in message(lambda: load_tokenizer(tmp_path), CalibrationError)


class Words:
    """A tokenizer, as far as texts need one, of words that it was given."""

    unk_token_id = 0

    def __init__(self, *known: str) -> None:
        self._known = {word: number for number, word in enumerate(known, 1)}

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        if "!" in text:
            raise RuntimeError("WordLevel error:\nno token")
        return {"input_ids": [self._known.get(word, 0) for word in text.split() if word != "-"]}


def test_tokenizers_that_make_nothing_of_a_text(tmp_path: Path) -> None:
    path, words = tmp_path / "a.txt", Words("a", "b")
    for text, said in (
        ("- " * 100_000, f"the model's tokenizer makes no tokens of {path}"),
        (" ", "it has 0, 16 are missing"),
        ("x y z " * 100_000, f"the model's tokenizer knows nothing of {path}"),
        ("a b ! " * 100_000, "the model's tokenizer fails on this text: WordLevel error:"),
    ):
        path.write_text(text)
        assert said in refused(path, words, count=1)
    path.write_text("a x " * 100)
    tokens = read_windows(str(path), words, 4, 1).tokens  # type: ignore[arg-type]
    assert tokens.tolist() == [[1, 0, 1, 0]]
    # A stream without an end, of which no text has tokens.
    endless = itertools.repeat("- " * 1000)
    assert calibration._first_tokens(endless, words, 16) == []  # type: ignore[arg-type]


def test_long_texts_are_not_warned_about(tokenizer: PreTrainedTokenizerBase) -> None:
    # The embedded model's limit is 256; warnings are errors here, and transformers logs this one.
    assert tokenizer.model_max_length > 10**9


# Several texts


def test_several_texts_take_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    model = stream_of(EMBEDDED)
    texts = Texts.read(model, Calibration(["demo", "demo-held"], 5, 32), Measurement(samples=3))
    one, two = (read_windows(name, tokenizer, 32, 8).tokens for name in ("demo", "demo-held"))
    assert texts.windows.tokens.tolist() == torch.stack([one[0], two[0], one[1], two[1], one[2]]).tolist()
    assert (texts.windows.source, texts.windows.origin.count("excerpt")) == ("demo + demo-held", 2)
    assert texts.only is not None
    assert texts.only.tokens.tolist() == torch.stack([one[3], two[2], one[4]]).tolist()
    after = Texts.read(model, Calibration(("demo", "demo-held"), 5, 32), Measurement("demo-held", samples=3)).only
    assert after is not None
    assert after.tokens.tolist() == two[2:5].tolist()


def test_a_text_beside_given_windows(tokenizer: PreTrainedTokenizerBase) -> None:
    model, given = stream_of(EMBEDDED), torch.arange(96).view(3, 32)
    texts = Texts.read(model, Calibration([given, "demo"], 3), Measurement(samples=0))
    demo = read_windows("demo", tokenizer, 32, 1).tokens[0]
    assert texts.windows.tokens.tolist() == torch.stack([given[0], demo, given[1], given[2]]).tolist()
    with pytest.raises(UsageError, match="windows of several texts have the same length; got 16 and 32 tokens"):
        Texts.read(model, Calibration([given[:, :16], given], 3), Measurement(samples=0))


def test_several_texts_that_are_one_or_none() -> None:
    assert Calibration([Path("a.txt"), "a.txt"]) == Calibration("a.txt")
    with pytest.raises(UsageError, match="no text to calibrate on"):
        Calibration([])
    with pytest.raises(UsageError, match="samples must be 2 or more"):
        Calibration(["a.txt", "b.txt"], samples=1)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "LukeTokenizer", "TokenizersBackend"])
def test_a_tokenizer_in_one_file(tmp_path: Path, kind: str) -> None:
    """As transformers 5 saves it, whatever files its class names."""
    model = save_model_with_tokenizer(tmp_path / "model")
    edit_json(model / "tokenizer_config.json", tokenizer_class=kind)
    expected = load_tokenizer(EMBEDDED)(SPACED)["input_ids"]
    assert load_tokenizer(model)(SPACED, add_special_tokens=False)["input_ids"] == expected


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "MBart50Tokenizer"])
def test_classes_that_lose_spaces(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens of bytes that a class joins as SentencePiece does: what tokenizer.json says is followed, and said."""
    model = save_model_with_tokenizer(tmp_path / "model")
    edit_json(model / "tokenizer_config.json", tokenizer_class=kind)
    if kind.startswith("Llama"):  # as in transformers 5.15, which later versions mend for this class alone
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", LlamaTokenizer.from_pretrained)
    made = AutoTokenizer.from_pretrained(model)
    assert made.decode(made(SPACED, add_special_tokens=False)["input_ids"]) != SPACED
    tokenizer, plain = load_tokenizer(model), load_tokenizer(EMBEDDED)
    ids = tokenizer(SPACED, add_special_tokens=False)["input_ids"]
    assert ids == plain(SPACED, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == SPACED
    assert "loses parts of texts, so it is taken as tokenizer.json says" in caplog.text


@pytest.mark.parametrize(
    ("words", "chosen", "windows", "left", "said"),
    [
        (8_000, {}, (128, 256), 16, "windows of 256 tokens, because no length was given"),
        (2_000, {}, (47, 256), 15, "calibrating on 47 windows of 256 tokens: the text has no more, but for what is"),
        (400, {}, (17, 128), 5, "calibrating on 17 windows of 128 tokens: the text has no more, but for what is left"),
        (400, {"length": 256}, (9, 256), 2, "calibrating on 9 windows of 256 tokens"),
        (1_000, {"samples": 15}, (15, 256), 14, "windows of 256 tokens, because no length was given"),
        (1_000, {"samples": 99}, None, 0, "is too short: 99 windows of 256 tokens need 25344 tokens"),
        (1_000, {"samples": 16, "length": 600}, None, 0, "a length of 600 is more than the model's 256 positions"),
        (4, {}, None, 0, "is too short: 1 windows of 128 tokens need 128 tokens"),
    ],
)
def test_as_much_as_the_text_has(
    tmp_path: Path, words: int, chosen: dict[str, Any], windows: tuple[int, int] | None, left: int, said: str
) -> None:
    file, model = tmp_path / "text.txt", stream_of(EMBEDDED)
    file.write_text(prose(words))
    if windows is None:
        with pytest.raises(NiwakiError, match=re.escape(said)):
            Texts.read(model, Calibration(str(file), **chosen), Measurement(), 16)
        return
    texts = Texts.read(model, Calibration(str(file), **chosen), Measurement(), 16)
    assert tuple(texts.windows.tokens.shape) == windows
    assert any(said in note for note in texts.notes), texts.notes
    assert texts.only is not None
    assert len(texts.only.tokens) == left
    # The same is calibrated on, whatever is measured.
    for measured in (Measurement(samples=0), Measurement("demo-held"), Measurement(samples=1)):
        again = Texts.read(model, Calibration(str(file), **chosen), measured, 16)
        assert again.windows.fingerprint() == texts.windows.fingerprint()


def test_as_much_as_a_cpu_calibrates_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger model gets fewer windows, and then shorter ones, of all texts together; a GPU all."""
    file, model = tmp_path / "text.txt", stream_of(EMBEDDED)
    file.write_text(prose(8_000))
    weights = sum(matrix.size for matrix in model.matrices())
    for most, windows in ((40 * 256, (40, 256)), (100, (32, 256))):
        monkeypatch.setattr("niwaki.texts.texts._ON_A_CPU", most * weights)
        texts = Texts.read(model, Calibration(str(file)), Measurement(samples=0))
        assert tuple(texts.windows.tokens.shape) == windows
        assert any("more would take a CPU long; --samples and --length set others" in note for note in texts.notes)
        both = Texts.read(model, Calibration((str(file), "demo")), Measurement(samples=0))
        assert tuple(both.windows.tokens.shape) == windows
    monkeypatch.setattr("niwaki.texts.texts._LEAST_TOKENS", 2048)
    assert usual_size(model, Calibration(str(file))) == (16, 128)
    assert usual_size(model, Calibration(str(file), length=256)) == (8, 256)
    model.device = torch.device("cuda")
    assert usual_size(model, Calibration(str(file))) == (128, 256)


def test_a_short_text_is_measured_in_shorter_windows(tmp_path: Path) -> None:
    file, model = tmp_path / "text.txt", stream_of(EMBEDDED)
    file.write_text(prose(40))
    windows = read_heldout(model, str(file), Measurement(str(file)))
    assert tuple(windows.tokens.shape) == (2, 128)
    assert "is too short for 256" in windows.notes[-1]
    with pytest.raises(CalibrationError, match="is too short: 2 windows of 256 tokens"):
        read_heldout(model, str(file), Measurement(str(file), samples=2, length=256))
