"""Files of text, and of rows of a table, compressed or not; all are read piece by piece."""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from niwaki.errors import CalibrationError, raised_as, shown

#: Files of rows in JSON: an object or a text in each line, or one list of them.
JSON = {".jsonl", ".ndjson", ".json"}
#: All files of rows.
ROWS = {*JSON, ".csv", ".tsv", ".parquet"}
#: What is read, for messages.
_READ = "read are text, .jsonl, .json, .csv, .tsv and .parquet, also as .gz, .xz, .bz2 or .zst"
#: How to install what other files and data sets need.
EXTRA = "pip install datasets"
#: Characters read at a time, and rows.
_PIECE, _ROWS = 1 << 20, 256
#: Characters in a line, or in an entry of a list.
_LONGEST = 1 << 27
_SPACE, _AFTER = re.compile(r"\s*"), re.compile(r"\s*([,\]])")
#: What is in quotes in a line of CSV, also where they do not end.
_QUOTED = re.compile(r'"[^"]*("|$)')
_JSON_LINES = "; each line of a file of rows is a JSON object, or the file is one list of them"
#: What files fail with that are damaged, or that the system cannot read.
_DAMAGES = (OSError, EOFError, lzma.LZMAError, zlib.error)
_DECODER = json.JSONDecoder()


def _open_zstd(path: Path) -> IO[bytes]:
    try:
        import pyarrow
    except ImportError as error:
        raise CalibrationError(f"{path} is in Zstandard, which needs an extra: {EXTRA}") from error
    stream: IO[bytes] = pyarrow.input_stream(str(path), compression="zstd")
    return stream


class _CompressedStreams(io.RawIOBase):
    """The content of compressed streams in a file, one after the other, between and after which zeros may be.

    ``lzma.open`` and ``bz2.open`` take a damaged stream for the end of the file if it is not the first one.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]) -> None:
        self._file, self._begin, self._stream = file, begin, begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            raw = b""
            if self._stream.eof:
                raw = self._stream.unused_data
                while not (raw := raw.lstrip(b"\0")):
                    if not (raw := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                        return 0
                self._stream = self._begin()
            elif self._stream.needs_input and not (raw := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                raise EOFError("it ends in the middle of a compressed stream")
            data = self._stream.decompress(raw, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


_COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".xz": lambda path: io.BufferedReader(_CompressedStreams(path.open("rb"), lzma.LZMADecompressor)),
    ".bz2": lambda path: io.BufferedReader(_CompressedStreams(path.open("rb"), bz2.BZ2Decompressor)),
    ".zst": _open_zstd,
}
#: Suffixes of files, none of which is a data set's name.
SUFFIXES = {".txt", *ROWS, *_COMPRESSED}


def _bytes(path: Path) -> IO[bytes]:
    """The content of a file, without its compression."""
    unpack = _COMPRESSED.get(path.suffix.lower())
    opened: IO[bytes] = unpack(path) if unpack else path.open("rb")
    return opened


def kind(path: Path) -> str:
    """The suffix in small letters, without that of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def pieces(path: Path, source: str) -> Iterator[str]:
    """The text of a file, in pieces that join to the whole; CalibrationError where it is none."""
    with _opened(path, source) as file:
        while piece := file.read(_PIECE):
            _check_text(piece, source)
            yield piece


def rows(path: Path, source: str) -> Iterator[tuple[str, Any]]:
    """Where each row is, and the row: an object with the values of its columns, or whatever else JSON has there.

    CalibrationError for what is damaged, or is not what the file's name says.
    """
    if kind(path) == ".parquet":
        yield from _parquet_rows(path, source)
        return
    if kind(path) in JSON:
        with _opened(path, source) as file:
            read = _listed if _first(file) == "[" else _json_lines
    else:
        read = _csv_rows
    with _opened(path, source) as file:
        yield from read(file, path)


@contextlib.contextmanager
def _opened(path: Path, source: str) -> Iterator[TextIO]:
    """The text of a file, compressed or not; CalibrationError where it cannot be opened or read."""
    what, damages = f"{source} cannot be read as UTF-8 text", (*_DAMAGES, UnicodeDecodeError)
    failing = raised_as(CalibrationError, what, damages, f"; {_READ}")
    with failing, io.TextIOWrapper(_bytes(path), encoding="utf-8-sig") as file:
        yield file


def _check_text(text: str, source: str) -> None:
    if "\0" in text:
        raise CalibrationError(f"{source} is not text: it has NUL characters, as UTF-16 and binary files do; {_READ}")


def _lines(file: TextIO, path: Path) -> Iterator[tuple[str, str]]:
    """Where each line is, and the line."""
    for number in itertools.count(1):
        line, where = file.readline(_LONGEST), f"{path}, line {number}"
        if not line:
            return
        if len(line) == _LONGEST:
            raise CalibrationError(f"{where}: longer than {_LONGEST:,} characters; are there no line ends?")
        _check_text(line, str(path))
        yield where, line


def _json_lines(file: TextIO, path: Path) -> Iterator[tuple[str, Any]]:
    """The values in lines with something in them."""
    for where, line in _lines(file, path):
        if line.strip():
            with raised_as(CalibrationError, f"{where}: not a JSON object", ValueError, _JSON_LINES):
                value = parse_json(line)
            yield where, value


def _listed(file: TextIO, path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of the list that a file is."""
    _first(file)
    text, number = _first(file), 0
    is_over = text == "]"
    at = int(is_over)
    while not is_over:
        number += 1
        where = f"{path}, entry {number}"
        while True:  # until all of it is there
            try:
                value, at, is_over = _entry(text, at)
                break
            except ValueError as error:
                reason = str(error)
            more = file.read(max(_PIECE, len(text) - at)) if len(text) - at < _LONGEST else ""
            if not more:
                raise CalibrationError(f"{where}: not an entry of a JSON list: {reason}")
            text, at = text[at:] + more, 0
        yield where, value
    if text[at:].strip() or _first(file):
        raise CalibrationError(f"{path}: more follows after the list that it begins with")


def _first(file: TextIO) -> str:
    """The next character that is no space; "" where there is none."""
    return next((each for each in iter(lambda: file.read(1), "") if not each.isspace()), "")


def _entry(text: str, start: int) -> tuple[Any, int, bool]:
    """(an entry of a list, where the next one begins, whether there is none); ValueError where it does not end."""
    value, end = _value(text, start)
    after = _AFTER.match(text, end)
    if after is None:
        raise ValueError("no comma follows it, and the list does not end")
    return value, after.end(), after[1] == "]"


def _csv_rows(file: TextIO, path: Path) -> Iterator[tuple[str, Any]]:
    """Rows by the names in the first line, each with the line that it begins in."""
    csv.field_size_limit(_LONGEST)
    lines = (line for _, line in _lines(file, path))
    head = next(lines, "")
    delimiter = "\t" if kind(path) == ".tsv" else max(",;\t", key=_QUOTED.sub("", head).count)
    found = csv.reader(itertools.chain([head], lines), delimiter=delimiter, strict=True)
    where, taken = f"{path}, line 1", f"{delimiter!r} was taken as what separates columns"
    try:
        names = next(found, [])
        if twice := [name for name, count in Counter(filter(None, names)).items() if count > 1]:
            raise CalibrationError(f"{where}: several columns have the name {shown(twice[0])}; give each its own")
        while True:
            where = f"{path}, line {found.line_num + 1}"
            row = next(found, None)
            if row is None:
                return
            if len(row) > len(names):
                raise CalibrationError(
                    f"{where}: more fields than the first line has names of columns; are texts in quotes? {taken}"
                )
            if row:
                yield where, dict(itertools.zip_longest(names, row))
    except csv.Error as error:
        raise CalibrationError(f"{where}: not CSV: {error}; {taken}") from error


def _parquet_rows(path: Path, source: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise CalibrationError(f"{source} is in Parquet, which needs an extra: {EXTRA}") from error
    numbers, damages = itertools.count(1), (*_DAMAGES, ValueError)  # Arrow's are among them
    with raised_as(CalibrationError, f"{source} cannot be read as Parquet", damages), contextlib.ExitStack() as stack:
        file = stack.enter_context(_bytes(path))
        if kind(path) != path.suffix.lower():  # it is read from its end
            packed, file = file, stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(packed, file)
        for batch in parquet.ParquetFile(file).iter_batches(_ROWS):
            yield from ((f"{path}, row {next(numbers)}", row) for row in batch.to_pylist())


def parse_json(text: str) -> Any:
    """The value of a JSON text, all of it Unicode; ValueError says in a few words why it has none."""
    value, end = _value(text)
    if (rest := _SPACE.match(text, end)) and rest.end() < len(text):
        raise ValueError(f"no JSON (Extra data, column {rest.end() + 1})")
    return value


def _value(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value there, after spaces, and where it ends; ValueError as of :func:`parse_json`."""
    space = _SPACE.match(text, start)
    begin = space.end() if space else start
    try:
        value, end = _DECODER.raw_decode(text, begin)
        if "\\u" in text[begin:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair, which is not a character") from error
    except ValueError as error:
        raise ValueError("a number has too many digits") from error
    return value, end
