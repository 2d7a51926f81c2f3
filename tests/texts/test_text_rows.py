"""Files and data sets of rows as texts: against their values joined by hand, and transformers' own chat templates."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from niwaki import Calibration, Measurement
from niwaki.errors import CalibrationError, UsageError
from niwaki.models.processes import World
from niwaki.models.tokens import load_tokenizer
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.texts import files as text_files, rows as text_rows
from niwaki.texts.own import with_answers
from niwaki.texts.rows import ChatTemplate
from niwaki.texts.sources import read_text
from niwaki.texts.texts import Texts, read_windows
from support.command import Command
from support.models import EMBEDDED, begin_texts, edit_json, message, save_model_with_tokenizer
from support.streams import stream_of

TEXTS = ['A text, with "quotes"; and\ttabs', "Zwei\nZeilen: é 日本 🙂 [1], {2}", "", "7", "the last one \\ of them"]
TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of the bees."}]
TEMPLATE = (
    "<s>{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}{{ call }}{% endfor %}</s>\n{% endfor %}"
)
FAILING = "{% if messages[0].role == 'fail' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE


def in_zstd(raw: bytes) -> bytes:
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as file:
        file.write(raw)
    packed: bytes = stream.getvalue().to_pybytes()
    return packed


def in_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    return file.getvalue()


def in_csv(delimiter: str, texts: list[str] = TEXTS) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerows([["id", "text"], *enumerate(texts)])
    return file.getvalue().encode()


def in_lines(rows: list[Any]) -> bytes:
    return "\n\n".join(map(json.dumps, rows)).encode()


def in_list(rows: list[Any], **layout: Any) -> bytes:
    return json.dumps(rows, ensure_ascii=False, **layout).encode()


ROWS: list[dict[str, Any]] = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
FILES: dict[str, bytes] = {
    "a.jsonl": in_lines(ROWS),
    "a.ndjson": in_lines(ROWS),
    "a.JSON": in_list(ROWS),
    "pretty.json": b"\n " + in_list(ROWS, indent=2) + b"\n",
    "texts.json": in_list(TEXTS),
    "texts.jsonl": in_lines(TEXTS),
    "a.csv": in_csv(","),
    "semicolons.csv": in_csv(";"),
    "a.tsv": in_csv("\t"),
    "a.parquet": in_parquet(ROWS),
}
PLAIN_FILES = dict.fromkeys(("a.txt", "a.md", "a"), "\n\n".join(TEXTS).encode())
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": in_zstd,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(EMBEDDED)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """With a chat template and a token before each text."""
    path = begin_texts(save_model_with_tokenizer(tmp_path / "model"))
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


def written(path: Path, content: bytes | list[Any]) -> str:
    path.write_bytes(content if isinstance(content, bytes) else in_lines(content))
    return str(path)


def text_of(source: str, **options: Any) -> str:
    return "".join(read_text(source, **options).pieces)


def refused(call: Callable[[], object]) -> str:
    return message(call, CalibrationError)


# Files


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("name", FILES | PLAIN_FILES)
def test_files(tmp_path: Path, name: str, packed: str) -> None:
    source = written(tmp_path / f"{name}{packed}", PACKERS[packed]((FILES | PLAIN_FILES)[name]))
    assert text_of(source) == "\n\n".join(TEXTS)
    assert read_text(source).origin == source + (", texts joined by '\\n\\n'" if name in FILES else "")


@pytest.mark.parametrize("packed", [".gz", ".xz", ".bz2", ".zst"])
def test_several_compressed_streams(tmp_path: Path, packed: str) -> None:
    """As parallel packers write them: one that is damaged is no end of the text."""
    first, second = "the first stream " * 9, "and the second " * 9_999
    one, two = (PACKERS[packed](text.encode()) for text in (first, second))
    assert text_of(written(tmp_path / f"a.txt{packed}", one + two)) == first + second
    damaged = [one + two[:-5], one + two[:9], one + b"\xff" + two[1:], one + two[:2] + b"\xff" + two[3:], one + b"x"]
    damaged += [b"nothing that is packed", one[:-5], one[:10] + b"\xff" * 50]
    middle = len(two) // 2
    damaged.append(one + two[:middle] + bytes(value ^ 0xFF for value in two[middle : middle + 9]) + two[middle + 9 :])
    for number, content in enumerate(damaged):
        source = written(tmp_path / f"{number}.txt{packed}", content)
        assert "cannot be read as UTF-8 text" in refused(lambda source=source: text_of(source))  # type: ignore[misc]
    if packed == ".xz":
        padded = one + bytes(4) + two + bytes(8 + (1 << 20))
        assert text_of(written(tmp_path / "padded.txt.xz", padded)) == first + second


@pytest.mark.parametrize("piece", [1, 2, 7, 50])
def test_lists_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(text_files, "_PIECE", piece)
    for number, content in enumerate((FILES["a.JSON"], FILES["pretty.json"], FILES["texts.json"])):
        assert text_of(written(tmp_path / f"{number}.json", content)) == "\n\n".join(TEXTS)
    assert text_of(written(tmp_path / "none.json", b" [ \n ] ")) == ""


def test_a_list_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_PIECE", 100)
    source = written(tmp_path / "a.json", in_list(ROWS)[:-1] + b", broken")
    pieces = read_text(source).pieces
    assert [next(pieces) for _ in range(3)] == [TEXTS[0], *(f"\n\n{text}" for text in TEXTS[1:3])]
    assert "entry 6: not an entry of a JSON list" in refused(lambda: "".join(pieces))


def test_a_data_set_of_the_library(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """By the same rules."""
    (tmp_path / "set").mkdir()
    rows = [{"instruction": "Say it.", "input": "", "output": text} for text in TEXTS]
    (tmp_path / "set" / "a.parquet").write_bytes(in_parquet(rows))
    source = str(tmp_path / "set")
    assert text_of(source) == "\n\n".join("\n\n".join(("Say it.", text)) for text in TEXTS)
    assert text_of(source, field="output") == "\n\n".join(TEXTS)
    assert "of the column 'output'" in read_windows(source, tokenizer, 4, 1, field="output").origin


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'{\n  "default": {"description": "x",\n "features": {}}\n}', "line 1: not a JSON object"),
        ("a.json", b'{"default": {"description": "x", "features": {}}}', "only 'default'"),
        ("a.json", b'{"data": [{"text": "x"}]}', "only 'data'"),
        ("a.json", b'[{"text": "x"}', "entry 1: not an entry"),
        ("a.json", b'[{"text": "x"} {"text": "y"}]', "entry 1: not an entry"),
        ("a.json", b'[{"text": "x"},]', "entry 2: not an entry"),
        ("a.json", b'[{"text": "x"}]\n[]', "more follows"),
        ("a.json", b"[]]", "more follows"),
        ("a.json", b'[{"text": "x"}, "y"]', "entry 2: not an object with a field 'text'"),
        ("a.json", b'["x", {"text": "y"}]', "entry 2: not a text"),
        ("a.json", b'["x", "\\ud83d"]', "half of a surrogate pair"),
        ("a.json", b"[7]", "entry 1: not an object"),
        ("a.json", b"[[]]", "entry 1: not an object"),
        ("a.json", b'["x\xff"]', "cannot be read as UTF-8 text"),
        ("a.csv", b"name,size\nx,y\n", "line 2: no column 'text', and no other that is known, only 'name', 'size'"),
        (
            "a.csv",
            b",body,n\n0,x,y\n",
            "line 2: no column 'text', and no other that is known, only a column without a name, 'body', 'n'; choose",
        ),
        ("a.csv", b"text\nsome prose, and more\n", "line 2: more fields"),
        ("a.csv", b'text\n"never closed\n\n\n', "line 2: not CSV: unexpected end of data"),
        ("a.csv", b'text\n\n"two\nlines",y\n', "line 3: more fields"),
        ("a.csv", b"text;id\nx;1\ny;2;3\n", "line 3: more fields than the first line has names of columns; are texts"),
        ("a.csv", b"text;id\nx;1\ny;2;3\n", "';' was taken as what separates columns"),
        ("a.csv", b'"text",a;b;c\nx,y\n', "line 1: not CSV: ';' expected after '\"'; ';' was taken as what separates"),
        ("a.tsv", b"text\nx\ty\n", "'\\t' was taken as what separates columns"),
        ("a.csv", b"text,id,text\nx,1,y\n", "line 1: several columns have the name 'text'; give each its own"),
        ("a.csv", b"text,,\nx,,\n", None),
        ("a.csv", b'text,"a;b;c"\nx,"y"\n', None),
        ("a.csv", b"text,id\nx\n\n", None),
        ("a.csv", b"id,text\n7\n", "line 2: not an object with a field 'text'"),
        ("a.txt", b"fine\xff\xfe\x00 not fine", "cannot be read as UTF-8 text"),
        ("a.txt", bytes(range(256)) * 10, "cannot be read as UTF-8 text"),
        ("a.csv", "text\nx\n".encode("utf-16"), "cannot be read as UTF-8 text"),
        ("a.csv", "text\nx\n".encode("utf-16-le"), "NUL characters"),
        ("a.csv", b"text\nna\xefve\n", "cannot be read as UTF-8 text"),
        ("a.parquet", b"", "cannot be read as Parquet"),
        ("a.parquet", b"text\nx\n", "cannot be read as Parquet"),
        ("a.parquet", FILES["a.parquet"][:-9], "cannot be read as Parquet"),
        ("a.parquet.gz", b"no gzip", "cannot be read as Parquet"),
        ("a.parquet", in_parquet([{"text": 7}]), "row 1: not an object with a field 'text'"),
        ("a.parquet", in_parquet([{"image": b"x", "label": 1}]), "only 'image', 'label'"),
        ("a.jsonl.zst", in_zstd(FILES["a.jsonl"] * 99)[:-20], "cannot be read as UTF-8 text"),
        ("a.jsonl", in_lines([{"prompt": "x"}]), "--answers own"),
        ("a.jsonl", in_lines([{"instruction": "x", "output": "y"}, {"instruction": "x"}]), "line 3: not all of"),
        ("a.jsonl", in_lines([{f"c{i}": "x" for i in range(20)}]), "and 8 more"),
        ("a.jsonl", in_lines([{"messages": TALK}]), "no chat template"),
    ],
)
def test_what_is_no_table_of_texts(tmp_path: Path, name: str, content: bytes, said: str | None) -> None:
    source = written(tmp_path / name, content)
    if said is None:
        assert text_of(source) == "x"
    else:
        line = refused(lambda: text_of(source))
        assert said in line
        assert source in line


@pytest.mark.parametrize("more", [0, False, [], {}, 5])
@pytest.mark.parametrize("column", ["input", "context"])
def test_more_about_a_task_is_text_or_nothing(tmp_path: Path, column: str, more: Any) -> None:
    answer = "output" if column == "input" else "response"
    rows = [{"instruction": "Say it.", column: each, answer: "it"} for each in ("", None, more)]
    assert text_of(written(tmp_path / "a.jsonl", rows[:2])) == "\n\n".join(["Say it.", "it"] * 2)
    said = refused(lambda: text_of(written(tmp_path / "b.jsonl", rows)))
    assert f"b.jsonl, line 5: not all of instruction, {column} and {answer} are text" in said


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    body = "".join(f"{n},{n / 7:.3f},a text of {n} words,{n if n < 40 else 'seven'}\n" for n in range(50))
    table = written(tmp_path / "a.csv", f"n,share,body,late\n{body}".encode())
    for column, first in (("n", "0"), ("share", "0.000")):
        said = refused(lambda column=column: text_of(table, field=column))  # type: ignore[misc]
        assert f"a.csv, line 2: the column '{column}' has numbers alone, such as {first}, which are not text" in said
        assert "of 'n', 'share', 'body', 'late', choose one of texts with --field" in said
    assert text_of(table, field="body").startswith("a text of 0 words\n\na text of 1 words")
    assert text_of(table, field="late").endswith("39\n\nseven" + "\n\nseven" * 9)
    lines = written(tmp_path / "a.jsonl", [{"text": ""}, {"text": "-1,200.5"}, {"text": "1e-3"}])
    assert "the column 'text' has numbers alone, such as -1,200.5" in refused(lambda: text_of(lines))


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.parquet"])
def test_tables_without_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    file = io.BytesIO()
    parquet.write_table(table, file)
    content = {"a.csv": b"id,text\n", "a.json": b"[]", "a.parquet": file.getvalue()}[name]
    source = written(tmp_path / name, content)
    assert "it has 0, 16 are missing" in refused(lambda: read_windows(source, tokenizer, 16))


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.txt.zst", "a.jsonl.zst"):
        source = written(tmp_path / name, b"")
        line = refused(lambda source=source: text_of(source))  # type: ignore[misc]
        assert "pip install datasets" in line
        assert source in line
    assert text_of(written(tmp_path / "a.csv", FILES["a.csv"])) == "\n\n".join(TEXTS)


# Columns


def test_the_column_that_is_asked_for(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"text": "no", "body": text, "n": 7} for text in TEXTS]
    for name, content in (("a.jsonl", in_lines(rows)), ("a.json", in_list(rows)), ("a.parquet", in_parquet(rows))):
        source = written(tmp_path / name, content)
        assert text_of(source, field="body") == "\n\n".join(TEXTS)
        for field, said in (("bdy", "no column 'bdy', only 'text', 'body', 'n'"), ("n", "'n' that is text")):
            with pytest.raises(CalibrationError, match=said):
                text_of(source, field=field)
    assert "of the column 'body'" in read_windows(source, tokenizer, 4, 1, field="body").origin
    assert "not an object with a field 'body'" in refused(
        lambda: text_of(written(tmp_path / "b.json", in_list(TEXTS)), field="body")
    )


def test_columns_of_all_texts_of_a_run(tmp_path: Path) -> None:
    """Texts without columns stay as they are; where none has some, a column makes no sense."""
    model = stream_of(EMBEDDED)
    source = written(tmp_path / "a.csv", in_csv(",", [f"{text} {n}" for text in TEXTS for n in range(30)]))
    texts = Texts.read(model, Calibration([source, "demo"], 2, 32, field="text"), Measurement("demo-held", samples=1))
    assert texts.windows.tokens.shape == (2, 32)
    with pytest.raises(UsageError, match="'text'"):
        Texts.read(model, Calibration("demo", 2, 32, field="text"), Measurement(samples=0))
    other = written(tmp_path / "b.csv", ("title,text\n" + "the title,7\n" * 50).encode())
    measured = Texts.read(model, Calibration("demo", 2, 32), Measurement(other, samples=1, field="title"))
    assert measured.only is not None
    assert "of the column 'title'" in measured.only.origin


def test_named_data_sets_have_their_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for, which is for other texts of the same run."""
    rows = [{"text": "yes", "sentence": "of ptb", "body": "no"}]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: iter(rows))
    monkeypatch.setattr("niwaki.texts.sources.refusal", lambda *_: None)
    for source, expected in (("c4", "yes"), ("ptb", "of ptb"), ("me/mine", "no")):
        assert text_of(source, field="body") == expected


# Conversations


SHARED = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Why?"},
    {"from": "gpt", "value": "Because."},
]
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]
CALL: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "time?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]},
]


@pytest.mark.slow
def test_conversations(tmp_path: Path, model: Path) -> None:
    """What transformers makes of them, one after the other, in windows that have one token before the text."""
    tokenizer: Any = load_tokenizer(model)
    called = [{**CALL[0], "content": "What time?"}, {**CALL[1], "content": ""}]
    for rows, expected, column in (
        ([{"messages": TALK, "id": 3}, {"messages": called}], [TALK, called], "messages"),
        ([{"messages": TALK}, {"messages": CALL}], [TALK, called], "messages"),
        ([{"conversations": SHARED}], [PLAIN], "conversations"),
    ):
        texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in expected]
        assert all(text.startswith("<s>[") for text in texts)
        source = written(tmp_path / "a.jsonl", rows)
        ids = tokenizer("".join(text.removeprefix("<s>") for text in texts), add_special_tokens=False)["input_ids"]
        assert ids.count(1) == sum(map(len, expected))  # the ends of messages are tokens of their own
        windows = read_windows(source, tokenizer, 9)
        assert windows.tokens[:, 1:].flatten().tolist() == ids[: len(ids) // 8 * 8]
        assert windows.tokens[:, 0].tolist() == [0] * (len(ids) // 8)
        assert (windows.tokens[:, 1:] != 0).all()
        assert f"conversations of {column} in the model's chat template" in windows.origin
        assert len(windows.notes) == 1
        assert column in windows.notes[0]
    plain = read_windows(source, tokenizer, 9, bos=False).tokens.flatten().tolist()
    assert plain == tokenizer("".join(texts), add_special_tokens=False)["input_ids"][: len(plain)]
    chosen = written(tmp_path / "b.jsonl", [{"text": "no", "chosen": TALK}])
    assert "Because" in text_of(chosen, field="chosen", template=chat(model))


def test_a_column_beside_images_is_text(tmp_path: Path) -> None:
    seen = [{"role": "user", "content": [{"type": "image", "path": "x.png"}]}]
    source = written(tmp_path / "a.jsonl", [{"messages": seen, "caption": "some words of a picture " * 20}])
    texts = Texts.read(stream_of(EMBEDDED), Calibration(source, 1, 32, field="caption"), Measurement(samples=0))
    assert "of the column 'caption'" in texts.windows.origin


def chat(model: Path) -> ChatTemplate | None:
    return ChatTemplate.of(load_tokenizer(model), 0)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"messages": TALK}, {"messages": []}], "line 3: no messages"),
        ([{"messages": TALK}, {"text": "x"}], "line 3: no messages"),
        ([{"messages": [{"role": "user"}]}], "line 1: not a message"),
        ([{"messages": [{"content": "x"}]}], "line 1: not a message"),
        ([{"messages": [{"role": "user", "content": 7}]}], "line 1: not a message"),
        ([{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}], "line 1: not a message"),
        ([{"messages": [{"role": "user", "content": [{"type": "image", "path": "x"}]}]}], "line 1: an image"),
        ([{"messages": [*TALK, "x"]}], "line 1: not a message"),
        ([{"messages": [{"role": "fail", "content": "x"}]}] * 2, "line 1: the model's chat template fails: no"),
    ],
)
@pytest.mark.slow
def test_what_is_no_conversation(tmp_path: Path, model: Path, rows: list[Any], said: str) -> None:
    edit_json(model / "tokenizer_config.json", chat_template=FAILING)
    source = written(tmp_path / "a.jsonl", rows)
    assert said in refused(lambda: text_of(source, template=chat(model)))


def test_rows_that_the_template_refuses_are_left_out(tmp_path: Path, model: Path) -> None:
    edit_json(model / "tokenizer_config.json", chat_template=FAILING)
    wrong = {"messages": [{"role": "fail", "content": "x"}]}
    for name, rows in (
        ("a", [{"messages": TALK}] * 3),
        ("b", [wrong, {"messages": TALK}, wrong, *[{"messages": TALK}] * 2]),
    ):
        written(tmp_path / f"{name}.jsonl", rows)
    one, other = (read_windows(str(tmp_path / f"{name}.jsonl"), load_tokenizer(model), 9) for name in "ab")
    assert one.tokens.tolist() == other.tokens.tolist()
    assert len(one.notes) == 1
    assert "(2 conversations, which the chat template refuses)" in other.notes[1]
    assert other.notes[1].endswith("line 1: the model's chat template fails: no")


@pytest.mark.parametrize("arguments", ['{"city": "Bern"}', {"city": "Bern"}])
@pytest.mark.parametrize("wrapped", [True, False])
def test_arguments_of_tools_are_objects(tmp_path: Path, model: Path, arguments: Any, wrapped: bool) -> None:
    """As templates expect them; many files have them as JSON text."""
    call = {"name": "weather", "arguments": arguments}
    template = "{% for call in messages[0].tool_calls %}{{ (call.function or call).arguments.city }}{% endfor %}"
    edit_json(model / "tokenizer_config.json", chat_template=template)
    calls = [{"type": "function", "function": call} if wrapped else call]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    source = written(tmp_path / "a.jsonl", [{"messages": messages}])
    assert text_of(source, template=chat(model)) == "Bern"


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [USER, ANSWER], "tools": TOOLS}, "weather|user:Hi|assistant:Ho|"),
        ({"messages": [USER, ANSWER], "tools": json.dumps(TOOLS)}, "weather|user:Hi|assistant:Ho|"),
        ({"messages": [USER], "tools": []}, "user:Hi|"),
        ({"messages": [USER], "tools": None}, "user:Hi|"),
        ({"conversations": [USER, ANSWER], "system": "Be short."}, "system:Be short.|user:Hi|assistant:Ho|"),
        ({"conversations": [USER], "system": " "}, "user:Hi|"),
        ({"messages": [{"role": "system", "content": "A"}, USER], "system": "B"}, "system:A|user:Hi|"),
        ({"prompt": [USER], "completion": [ANSWER]}, "user:Hi|assistant:Ho|"),
        ({"messages": json.dumps([USER, ANSWER])}, "user:Hi|assistant:Ho|"),
    ],
)
def test_what_stands_beside_messages(tmp_path: Path, model: Path, row: dict[str, Any], said: str) -> None:
    """Tools, what the system says, and messages in columns of a task or as JSON text."""
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}|{% endfor %}"
        "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}"
    )
    edit_json(model / "tokenizer_config.json", chat_template=template)
    assert text_of(written(tmp_path / "a.jsonl", [row]), template=chat(model)) == said


def test_text_that_is_json_of_something_else(tmp_path: Path, model: Path) -> None:
    assert text_of(written(tmp_path / "a.jsonl", [{"text": '[{"a": 1}]'}]), template=chat(model)) == '[{"a": 1}]'


def test_tools_that_are_none(tmp_path: Path, model: Path) -> None:
    source = written(tmp_path / "a.jsonl", [{"messages": [USER], "tools": "a hammer"}])
    assert "tools are not a list of definitions; got 'a hammer'" in refused(
        lambda: text_of(source, template=chat(model))
    )


def test_conversations_are_made_into_text_as_they_are_needed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_FIRST", 2)
    monkeypatch.setattr(text_rows, "_MOST", 5)
    counts: list[int] = []

    def render(_: str, conversations: Any, __: Any, tools: Any, *, ask: bool) -> list[str]:
        assert tools == (None,) * len(conversations)
        assert not ask
        counts.append(len(conversations))
        return [talk[0]["content"] for talk in conversations]

    monkeypatch.setattr(text_rows, "rendered_each", render)
    rows = [{"messages": [{"role": "user", "content": f"{n} "}]} for n in range(20)]
    opened = read_text(written(tmp_path / "a.jsonl", rows), template=chat(model))
    assert [next(opened.pieces) for _ in range(3)] == ["0 ", "1 ", "2 "]
    assert counts == [2, 4]
    assert "".join(opened.pieces) == "".join(f"{n} " for n in range(3, 20))
    assert counts == [2, 4, 5, 5, 4]


@pytest.mark.parametrize(
    ("row", "asked", "columns"),
    [
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n\n1, 2", "instruction, input and output"),
        ({"instruction": "Add.", "input": None, "output": "3"}, "Add.", "instruction, input and output"),
        ({"instruction": "Add.", "output": "3"}, "Add.", "instruction, input and output"),
        ({"instruction": "Add.", "context": "1", "response": "3"}, "Add.\n\n1", "instruction, context and response"),
        ({"prompt": "Add.", "completion": "3"}, "Add.", "prompt and completion"),
        ({"prompt": "Add.", "response": "3"}, "Add.", "prompt and response"),
        ({"id": 1, "question": "Add.", "answer": "3"}, "Add.", "question and answer"),
    ],
)
@pytest.mark.slow
def test_tasks(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], asked: str, columns: str
) -> None:
    """As the user's and the model's messages where there is a template; else joined."""
    seen: list[Any] = []

    def render(_: str, conversations: Any, *__: Any, **___: Any) -> list[str]:
        seen.extend(conversations)
        return ["x" for _ in conversations]

    monkeypatch.setattr(text_rows, "rendered_each", render)
    source = written(tmp_path / "a.jsonl", [row, row])
    assert text_of(source, template=chat(model)) == "xx"
    assert seen == 2 * [[{"role": "user", "content": asked}, {"role": "assistant", "content": "3"}]]
    assert text_of(source) == f"{asked}\n\n3\n\n{asked}\n\n3"
    for opened in (read_text(source), read_text(source, template=chat(model))):
        assert columns in opened.origin
        assert columns in opened.notes[0]


def test_a_template_that_none_is_chosen_of(model: Path) -> None:
    tokenizer: Any = load_tokenizer(model)
    tokenizer.chat_template = {"a": "x", "b": "y"}
    assert "the model's chat template" in refused(lambda: ChatTemplate.of(tokenizer, None))
    tokenizer.chat_template = None
    assert ChatTemplate.of(tokenizer, None) is None


# Runs


@pytest.mark.slow
def test_commands(niwaki_: Command, tmp_path: Path, model: Path) -> None:
    talks = written(tmp_path / "talks.jsonl", [{"messages": TALK, "note": f"a note {n}"} for n in range(40)])
    table = written(tmp_path / "table.csv", b"body;size\n" + b"some words in a row of it;7\n" * 40)
    out, options = tmp_path / "out", ["--sparsity", 0.5, "--solver", "magnitude", "--samples", 2, "--length", 16]
    ran = niwaki_("prune", model, out, *options, "--calibration", talks, "--text-samples", 2)
    assert ran.code == 0, ran.err
    record = Record.load(out / "niwaki.json")
    assert "conversations of messages in the model's chat template" in record.calibration["origin"]
    assert any(note.startswith(f"{talks} was read as") for note in record.notes)
    assert "conversations of messages" in record.perplexity["after"].origin
    values = tmp_path / "values.json"
    ran = niwaki_("eval", model, "--text", table, "--length", 16, "--field", "body", "--record", values)
    assert ran.code == 0, ran.err
    assert "of the column 'body'" in json.loads(values.read_text())["perplexity"]["protocol"]
    for text, field, said in ((table, "none", "no column 'none'"), ("demo-held", "body", "'body'")):
        ran = niwaki_("eval", model, "--text", text, "--length", 16, "--field", field)
        assert ran.code
        assert said in ran.err


@pytest.mark.slow
def test_answers_in_the_place_of_others_are_noted(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.files.cached_assets_path", lambda *_: tmp_path / "kept")
    source = written(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": TALK[:1]}])
    calibration = Calibration(source, samples=1, length=64, answers="own")
    (windows,) = with_answers(stream_of(model), calibration, None, World(), Progress()).texts
    assert any(note.startswith(f"1 of the 2 conversations in {source}") for note in windows.notes)  # type: ignore[union-attr]
