"""How names, solvers, numbers, bytes and durations are written for people."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: What moves a terminal's cursor, changes the direction of text, or is half of a character.
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    r"""``text`` with control codes as in ``"\x1b"``; lines and tabs stay."""
    return _CONTROL.sub(lambda code: code[0].encode("unicode_escape").decode(), text)


#: What LaTeX would take for something else, and what it has instead.
_LATEX = {each: rf"\{each}" for each in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}


def latex(text: str) -> str:
    """``text`` as LaTeX shows it."""
    return "".join(_LATEX.get(each, each) for each in printable(text))


def markdown(text: object) -> str:
    """``text`` as markdown that shows it as it is, in one line: no link, picture, HTML or column of a table."""
    return re.sub(r"([\\`*\[\]<|])", r"\\\1", " ".join(printable(str(text)).split()))


class TableCell(NamedTuple):
    """A cell of a table for people: its text, whether it is the best of its column, its colour if in a heat map."""

    text: str
    best: bool = False
    step: int | None = None


class Table(NamedTuple):
    """A table for people, whose first column names the rows."""

    head: list[str]
    rows: list[list[TableCell]]

    @classmethod
    def of(cls, head: Iterable[str], rows: Iterable[Iterable[str]]) -> "Table":
        """The table whose cells are text alone."""
        return cls(list(head), [list(map(TableCell, row)) for row in rows])

    def markdown(self) -> list[str]:
        """The lines of the table in Markdown."""
        rows = [[f"**{cell.text}**" if cell.best else markdown(cell.text) for cell in row] for row in self.rows]
        return [f"| {' | '.join(row)} |" for row in (map(markdown, self.head), ["---"] * len(self.head), *rows)]

    def latex(self) -> list[str]:
        """The lines of the table in LaTeX, with the rules of the package booktabs."""
        head, *rows = [[latex(name) for name in self.head]] + [
            [rf"\textbf{{{latex(cell.text)}}}" if cell.best else latex(cell.text) for cell in row] for row in self.rows
        ]
        lines = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", rf"{' & '.join(head)} \\", r"\midrule"]
        return [*lines, *(rf"{' & '.join(row)} \\" for row in rows), r"\bottomrule", r"\end{tabular}"]


def counted(count: int | str, noun: str, plural: str = "") -> str:
    """``"1 window"``, ``"2,048 windows"``; ``plural`` is for nouns that need more than an s."""
    shown = f"{count:,}" if isinstance(count, int) else count
    return f"{shown} {noun if shown == '1' else plural or noun + 's'}"


def several(names: Sequence[str], most: int = 6) -> str:
    """The first of ``names``, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def kind(name: str) -> str:
    """What matrices of different experts have in common: "mlp.experts.*.up_proj"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def short(name: str) -> str:
    """The last part of a name that is no number."""
    return next((part for part in reversed(kind(name).split(".")) if part != "*"), name)


def in_words(described: dict[str, Any]) -> str:
    """``"admm-grad (iterations 20, rho 0.5)"``; with the mask of another ``"wanda + exact (memory 1)"``."""
    match described:
        case {"mask": dict(mask), "update": dict(update)}:
            return f"{in_words(mask)} + {in_words(update)}"
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in described.items()}
    values = ", ".join(f"{key} {value}" for key, value in shown.items() if key != "name")
    name = str(described.get("name", "?"))
    return f"{name} ({values})" if values else name


def duration(seconds: float) -> str:
    """``"45 s"``, ``"12 min"``, ``"3 h 05 min"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def estimated(seconds: float) -> str:
    """``"40 s"``, ``"3 min"``, ``"25 min"``, ``"3 h 30 min"``: no more digits than an estimate has."""
    for step, most in ((10, 90), (60, 600), (300, 5400)):
        if seconds < most:
            return duration(max(step, step * round(seconds / step)))
    return duration(1800 * round(seconds / 1800))


def text_in_words(calibration: Mapping[str, Any]) -> str:
    """A record's calibration text: ``"128 x 2048 tokens of c4"``, or what :func:`other_samples` says of them."""
    if said := other_samples(calibration):
        return f"{said} of {calibration['source']}"
    return "{samples} x {sequence_length} tokens of {source}".format_map(defaultdict(lambda: "?", calibration))


def other_samples(calibration: Mapping[str, Any]) -> str:
    """``"12 conversations with 14 images"``, or ``"32 pairs with 1,402 tokens"``; "" for windows of text."""
    for what, noun in (("images", "conversation"), ("pairs", "pair")):
        if what in calibration:
            parts = "image" if what == "images" else "token"
            return f"{counted(calibration['samples'], noun)} with {counted(calibration[what], parts)}"
    return ""


def short_text(name: str) -> str:
    """The name of a text without the folders of its file; names of data sets stay."""
    return Path(name).name if os.path.isabs(name) or Path(name).suffix else name


def size(count: float) -> str:
    """Bytes with three digits: ``"12 bytes"``, ``"184 KiB"``, ``"4.00 GiB"``."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 999.5 or unit == "TiB":
            break
        count /= 1024
    digits = 0 if unit == "bytes" or count >= 99.5 else 1 if count >= 9.95 else 2
    return f"{count:.{digits}f} {unit}"


def two_digits(error: float) -> str:
    """A relative error with two significant digits: ``"0.10"``, ``"0.0031"``, ``"1.2e-05"``."""
    return f"{error:#.2g}".removesuffix(".") if error else "0"
