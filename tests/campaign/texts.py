"""Texts, questions and prompts, good and mutated; a reader of its own and transformers alone are the judges."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from campaign.home import SMALL, contents, furnish
from support.forks import command, refused

_home = Path()
_model: Any = None
_tokenizer: Any = None

_WORDS = (
    *("gentleman", "the", "naïve", "x", "CHAPTER", "日本", "don't", "--", "🙂", "\u202e", "\x1b[2J", "e\u0301", "<s>"),
    "\ufeff",
)
_SPACES = (" ", " ", " ", ", ", "\n", "\n\n", "  ", ". ", "\t", "\r\n", "\u2028", "\x85")


def _in_zstd(raw: bytes) -> bytes:
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as file:
        file.write(raw)
    return bytes(stream.getvalue())


def _of_zstd(path: Path, _: str) -> Any:
    return pyarrow.input_stream(str(path), compression="zstd")


_PACKED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
_PACKED[".zst"] = _in_zstd
_OPENED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _of_zstd}
_JSON, _CSV = {".jsonl", ".ndjson", ".json"}, {".csv", ".tsv"}
_ODD_VALUES: tuple[Any, ...] = (
    *(None, 7, -0.5, True, [], ["x"], {}, {"text": "x"}, "", " ", "\0", "x" * 5000, "\ud800", "half \udfff"),
)


def prepare(place: Path) -> None:
    global _home, _model, _tokenizer
    _home = place
    furnish(place)
    _model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    _tokenizer = AutoTokenizer.from_pretrained(place / "model")
    for name in ("datasets", "lm_eval.evaluator", "lm_eval.models.huggingface", "lm_eval.api.task"):
        import_module(name)  # so that forks have it


def case(chance: random.Random, place: Path) -> str:
    before = contents(_home)
    ended = chance.choice((_measured, _measured, _pruned, _pruned, _asked, _prompted))(chance, place)
    assert contents(_home) == before, "the input was changed"
    return ended


def _prose(chance: random.Random, words: int) -> str:
    return "".join(chance.choice(_WORDS) + chance.choice(_SPACES) for _ in range(words))


def _encoded(chance: random.Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=chance.random() < 0.5)


def _line(chance: random.Random) -> str:
    """A line of JSONL that is not as it should be, mostly."""
    text = _prose(chance, 5)
    right = _encoded(chance, {"text": text})
    odd = ({"text": chance.choice(_ODD_VALUES)}, {"texts": text}, [text], text)
    lines = (
        *(_encoded(chance, value) for value in odd),
        *(right[: chance.randrange(12)], "\ufeff" + right, right * 2, "   "),
        *('{"text": "x", "n": ' + "9" * 5000 + "}", '{"text": "x", "n": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        *('{"text": "\\ud83d\\ude42 \\u0000", "text": "the last one counts"}', '{"text": "\\ud83d"}'),
        *('{"text": "x", "other": "\\udc00"}', '{"text": NaN}'),
    )
    return chance.choice(lines)


def _mutated(chance: random.Random, raw: bytes) -> bytes:
    at, stop = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
    before, between, behind, text = raw[:at], raw[at:stop], raw[stop:], raw.decode(errors="replace")
    mutated = (
        *(before + each + raw[at:] for each in (chance.randbytes(chance.randrange(1, 9)), b"\0")),
        *(before + behind, before + between * 3 + behind, raw[: chance.randrange(20)], b"\xef\xbb\xbf" + raw),
        *(text.encode(chance.choice(("utf-16", "utf-16-le", "utf-32"))), text.encode("latin-1", "replace")),
        *(raw.replace(b"\n", b"\r\n"), chance.randbytes(len(raw)), bytes(len(raw)), b""),
    )
    return chance.choice(mutated)


def _file(chance: random.Random, place: Path, raw: bytes, kinds: tuple[str, ...]) -> Path:
    """A file with ``raw``, perhaps compressed, perhaps damaged, or something that is no file."""
    path = place / ("text" + chance.choice(kinds) + chance.choice(("", "", "", *_PACKED)))
    chosen = chance.random()
    if chosen < 0.4:
        raw = _mutated(chance, raw)
    if path.suffix in _PACKED and chosen < 0.95:
        raw = _PACKED[path.suffix](raw)
    if 0.4 < chosen < 0.5:
        raw = _mutated(chance, raw)
    if 0.5 < chosen < 0.55:
        chance.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: None))()
    else:
        path.write_bytes(raw)
    return path


def _check_streams(path: Path) -> None:
    """An error where more follows the streams of a file than zeros, which ``lzma.open`` and ``bz2.open`` ignore."""
    begin = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}.get(path.suffix)
    raw = path.read_bytes() if begin else b""
    while begin and (raw := raw.lstrip(b"\0")):
        stream = begin()
        stream.decompress(raw)
        raw = stream.unused_data


def _decoded(path: Path) -> tuple[str, bool]:
    """The characters of a text file up to its first mistake, and whether it has none."""
    if not path.is_file():
        return "", False
    raw, sound = b"", True
    try:
        with _OPENED.get(path.suffix, Path.open)(path, "rb") as file:
            while part := file.read1():
                raw += part
        _check_streams(path)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error):
        sound = False
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        text, sound = raw[: error.start].decode(), False
    return text.replace("\r\n", "\n").replace("\r", "\n"), sound


def _read(path: Path) -> tuple[str, bool]:
    """The text of a file up to its first mistake, and whether it has none."""
    text, sound = _decoded(path)
    kind = Path(path.stem).suffix if path.suffix in _PACKED else path.suffix
    if kind not in _JSON | _CSV:
        return ("", False) if "\0" in text else (text, sound)
    found: list[str] = []
    texts = 0
    try:
        for value in _table(text, kind) if kind in _CSV else _listed(text) if _is_list(text) else _lines(text, sound):
            texts += isinstance(value, str)
            found.append("" + (value if texts == len(found) + 1 else value["text"]))
    except (ValueError, LookupError, TypeError, RecursionError, csv.Error):
        sound = False
    return "\n\n".join(found), sound


def _is_list(text: str) -> bool:
    return text.lstrip().startswith("[")


def _lines(text: str, sound: bool) -> Iterator[Any]:
    """The values in a text's lines; of one that is not sound the last line is not whole."""
    for line in filter(str.strip, text.split("\n") if sound else text.split("\n")[:-1]):
        _whole(value := json.loads(line))
        yield value


def _listed(text: str) -> Iterator[Any]:
    """The values of a list, up to its first mistake."""
    decoder, rest, before = json.JSONDecoder(), text.strip(), "["
    while rest[:1] == before:
        rest = rest[1:].lstrip()
        if before == "[" and rest[:1] == "]":
            break
        value, end = decoder.raw_decode(rest)
        rest, before = rest[end:].lstrip(), ","
        if rest[:1] not in (",", "]"):
            break
        _whole(value)
        yield value
    if rest != "]":
        raise ValueError(rest)


def _table(text: str, kind: str) -> Iterator[Any]:
    """The rows of a table, up to its first mistake."""
    first = text.partition("\n")[0]
    mark = "\t" if kind == ".tsv" else max(",;\t", key="".join(first.split('"')[::2]).count)
    rows = csv.reader(io.StringIO(text.partition("\0")[0]), delimiter=mark, strict=True)
    names = next(rows, [])
    if len(set(named := [*filter(None, names)])) < len(named):
        raise ValueError(names)
    for row in filter(None, rows):
        if len(row) > len(names):
            raise ValueError(row)
        yield dict(zip(names, row, strict=False))
    if "\0" in text:
        raise ValueError(text)


def _whole(value: Any) -> str:
    """A value as text; ValueError where half of a surrogate pair is in it."""
    return json.dumps(value, ensure_ascii=False).encode().decode()


def _text(chance: random.Random, place: Path) -> tuple[Path, list[int], bool]:
    """A file, the tokens of its text up to its first mistake, and whether it has none."""
    texts = [_prose(chance, chance.randrange(1, 60)) for _ in range(chance.randrange(1, 12))]
    if chance.random() < 0.3:
        kind = chance.choice((".csv", ".tsv"))
        file = io.StringIO()
        rows = [["id", "text"], *enumerate(texts), *(["x", *texts[:3]] for _ in range(chance.random() < 0.1))]
        csv.writer(file, delimiter="\t" if kind == ".tsv" else chance.choice(",;")).writerows(rows)
        path = _file(chance, place, file.getvalue().encode(), (kind,))
    elif chance.random() < 0.2:
        values = [{"text": text} for text in texts] if chance.random() < 0.7 else [*texts]
        if chance.random() < 0.2:
            values.append(chance.choice(_ODD_VALUES))
        raw = json.dumps(values, indent=chance.choice((None, 1)), ensure_ascii=chance.random() < 0.5)
        path = _file(chance, place, raw.encode("utf-8", "surrogatepass"), (".json", ".jsonl"))
    elif chance.random() < 0.5:
        lines = [_encoded(chance, {"text": text}) for text in texts]
        if chance.random() < 0.4:
            lines.insert(chance.randrange(len(lines) + 1), _line(chance))
        path = _file(chance, place, "\n".join(lines).encode("utf-8", "surrogatepass"), (".jsonl", ".jsonl", ".json"))
    else:
        path = _file(chance, place, "".join(texts).encode(), ("", ".txt", ".txt", ".md", ".json.txt"))
    text, sound = _read(path)
    return path, _tokenizer(text, add_special_tokens=False)["input_ids"], sound


def _refused(ended: Any, place: Path, path: Path) -> str:
    line = refused(ended)
    left = [each for each in place.rglob("*") if each != path and each.is_file()]
    assert not left, f"{left} are left: {line}"
    return "refused"


@torch.no_grad()
def _measured(chance: random.Random, place: Path) -> str:
    path, ids, sound = _text(chance, place)
    length, samples = chance.choice((2, 7, 32, 128)), chance.choice((None, 1, 3))
    options = ["--text-samples", samples] if samples else []
    asked = ["eval", _home / "model", "--text", path, "--length", length, "--record", "r.json", *options]
    ended = command(asked, place)
    # What comes after the windows that are asked for need not be read.
    if len(ids) < length * (samples or 1) or (not sound and (samples is None or ended.code)):
        return f"eval {_refused(ended, place, path)}"
    assert ended.code == 0, ended.err
    measured = json.loads((place / "r.json").read_text())["perplexity"]
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)[:samples]
    assert (measured["windows"], measured["context"]) == tuple(windows.shape), measured
    logits = _model(windows).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).exp().item()
    assert abs(measured["value"] / loss - 1) < 1e-4, f"{measured['value']} for {loss}"
    return "eval measured"


def _pruned(chance: random.Random, place: Path) -> str:
    path, ids, sound = _text(chance, place)
    samples, length = chance.choice((1, 2, 5)), chance.choice((2, 16, 32))
    arguments: list[Any] = ["prune", _home / "model", "out", "--sparsity", "0.5"]
    arguments += ["--solver", chance.choice(("wanda", "magnitude"))]
    if heldout := chance.random() < 0.3:
        arguments += [*SMALL, "--text", path]
        length, samples = 32, 1  # those of SMALL; fewer windows than asked for will do
    else:
        arguments += ["--calibration", path, "--samples", samples, "--length", length, "--text-samples", 0]
    ended = command(arguments, place)
    if len(ids) < samples * length or (not sound and ended.code):
        return f"prune {_refused(ended, place, path)}"
    assert ended.code == 0, ended.err
    record = json.loads((place / "out" / "niwaki.json").read_text())
    if heldout:
        assert record["perplexity"]["after"]["windows"] == min(2, len(ids) // length), record["perplexity"]
        assert sound or len(ids) >= 2 * length
    else:
        tokens = torch.tensor(ids[: samples * length]).numpy().tobytes()
        assert record["calibration"]["tokens_sha256"] == hashlib.sha256(tokens).hexdigest()
    return "prune done"


@torch.no_grad()
def _prompted(chance: random.Random, place: Path) -> str:
    odd = ("", " ", "\0", "\udcff", "\n", "--", "-1", "é" * 3000, "word " * 30_000, "\x1b]0;x\x07", "[red]x", "<s>")
    prompt = chance.choice(odd) if chance.random() < 0.5 else _prose(chance, chance.randrange(1, 80))
    tokens = chance.choice((1, 3, 5))
    ended = command(["generate", _home / chance.choice(("model", "packed")), "--tokens", tokens, "--", prompt], place)
    ids = None if "\udcff" in prompt else _tokenizer(prompt)["input_ids"][-128 + tokens :]
    if not ids:
        return f"generate {_refused(ended, place, place)}"
    assert ended.code == 0, ended.err
    assert ended.out.startswith(prompt), ended.out
    if f"{_home}/model" in ended.err:
        for _ in range(tokens):
            ids.append(int(_model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert ended.out == prompt + _tokenizer.decode(ids[-tokens:], skip_special_tokens=True) + "\n", ended.out
    return "generated"


@torch.no_grad()
def _asked(chance: random.Random, place: Path) -> str:
    questions = [_question(chance) for _ in range(chance.randrange(1, 4))]
    listed = chance.random() < 0.3
    lines = [_encoded(chance, question) for question in questions]
    raw = f"[{', '.join(lines)}]" if listed else "\n".join(lines)
    path = place / ("q.json" if listed else "q.jsonl")
    written = raw.encode("utf-8", "surrogatepass")
    path.write_bytes(_mutated(chance, written) if chance.random() < 0.3 else written)
    ended = command(["eval", _home / "model", "--tasks", path, "--record", "r.json"], place)
    text, sound = _decoded(path)
    try:
        assert sound
        found = json.loads(text) if listed else [json.loads(line) for line in text.split("\n") if line.strip()]
        good = isinstance(found, list) and bool(found) and all(map(_is_question, found))
    except (AssertionError, ValueError, RecursionError):
        good = False
    likelihoods = [_likelihoods(question) for question in found] if good else [None]
    if None in likelihoods:
        return f"tasks {_refused(ended, place, path)}"
    assert ended.code == 0, ended.err
    score = json.loads((place / "r.json").read_text())["tasks"]["scores"][0]
    assert score["questions"] == len(found)
    ahead = []  # by how much the right choice is likelier than all others
    for question, values in zip(found, likelihoods, strict=True):
        assert values is not None
        ahead.append(values.pop(question["answer"]) - max(values))
    least, most = (sum(each > margin for each in ahead) for margin in (1e-3, -1e-3))
    assert least <= round(score["value"] * len(found)) <= most, f"{score} for {least} to {most}"
    return "tasks scored"


def _question(chance: random.Random) -> Any:
    choices = [_prose(chance, chance.randrange(1, 4)) for _ in range(chance.randrange(2, 5))]
    asked = chance.choice(("context", "question"))
    question: dict[str, Any] = {
        asked: _prose(chance, chance.randrange(1, 20)),
        "choices": choices,
        "answer": chance.randrange(len(choices)),
    }
    if chance.random() < 0.2:
        odd = (*_ODD_VALUES, ["x", "y"], 10**5, 1.0, ["x", 3])
        question[chance.choice([*question, "question"])] = chance.choice(odd)
    if chance.random() < 0.05:
        return chance.choice(_ODD_VALUES)
    if chance.random() < 0.05:
        question.pop(chance.choice([*question]))
    return question


def _is_question(entry: Any) -> bool:
    try:
        _whole(entry)
    except ValueError:
        return False
    if not isinstance(entry, dict) or (type(entry.get("context")) is str) == (type(entry.get("question")) is str):
        return False
    choices, answer = entry.get("choices"), entry.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(type(c) is str and c.strip() for c in choices):
        return False
    return type(answer) is int and 0 <= answer < len(choices)


def _likelihoods(question: dict[str, Any]) -> list[float] | None:
    """Of each choice, its logarithm; None where there are too few tokens, or too many."""
    context = question.get("context")
    if type(context) is not str:
        context = f"Question: {question['question']}\nAnswer:"
    values = []
    for choice in question["choices"]:
        whole, given = (_tokenizer(text)["input_ids"] for text in (f"{context} {choice}", context.rstrip()))
        if not given or len(whole) - len(given) > 128:  # positions
            return None
        follows, whole = whole[len(given) :], whole[-129:]
        logits = _model(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)[-len(follows) :]
        values.append(sum(row[token].item() for row, token in zip(logits, follows, strict=True)))
    return values
