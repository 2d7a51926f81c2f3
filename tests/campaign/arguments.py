"""Commands with arguments that a tired or hostile person would give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from typer.main import get_command

from campaign.home import HEALING, SMALL, contents, furnish
from niwaki.cli.app import app
from support.forks import command, refused

_home = Path()

#: What is given where a number, a name or a path belongs.
_ODD = (
    """
|| |0|-1|1|2|3|0.5|0.999|1e-9|1e309|nan|inf|-0|٣|0x10|60 %|1_000|+1|2.0|9223372036854775807|9223372036854775808
|2:4|4:2|0:0|0:1|1:1000000|per-row:0.5|mixed-2:4|block-4x4:0.5|int4:16|int4|int8|int9:3|auto|unstructured:0.6|2:4+per-row:0.6
|wanda|wanda+|+exact|wanda+ria+exact|admm1:rho=-1|adam:iterations=1|none|None|true|fast|balanced|best:epochs=1|wanda@fast
|uniform|error|loss|random|first|iterations=2|rho=|=|a=b|sweeps=1e9
|.|..|/|~|~nosuch/m|//|a/b|a/b/c|demo|demo-held|model|pruned|packed|text.txt|model/config.json
|/dev/null|/dev/full|/dev/zero|/dev/stdin|/proc/self/mem|/proc/1/environ|out|out/out|out.json
|\x1b[2J|é|\u202e|\udcff|'|%s|{}|[red]|[/]|--|--help|-|-h|,|,,|:|::|a:b:c:d|$HOME
|cpu|cpu:0|cpu:3|meta|cuda|cuda:99|cuda:-1|xpu|mps|privateuseone|float32|float64|bfloat16|float16
|8GiB|0GiB|1KiB|1e3|1h|0s|1m|c4|c5|wikitext2|REPO:CONFIG:SPLIT|which-follows|boolq|nosuch-task|always|never
""".strip("\n")
    .replace("\n", "")
    .split("|")
)
_ODD += ["\n", "a\nb", "1" * 400, "1" * 5000, "a" * 300, "a/" * 300, "x" * 100_000]
_PLACES = ("model", "pruned", "packed", "text.txt")  # of the home
#: What is right without any odd value; some more often, because there is more to them.
_COMMANDS: list[tuple[str, ...]] = [
    *[("prune", "model", "out", "--sparsity", "0.5", *SMALL, "--solver", "wanda")] * 5,
    ("quantize", "model", "out", "int8", *SMALL),
    *[("shrink", "model", "out", "--neurons", "0.25", *SMALL)] * 2,
    ("shrink", "model", "out", "--parameters", "0.96", *SMALL),
    *[("heal", "pruned", "out", "--teacher", "model", *HEALING)] * 3,
    *[("eval", "model", "--text", "demo-held", "--length", "32", "--text-samples", "2")] * 3,
    ("eval", "packed", "--tasks", "which-follows", "--limit", "2"),
    *[("generate", "packed", "The trees", "--tokens", "3")] * 2,
    ("pack", "pruned", "out"),
    ("unpack", "packed", "out"),
    ("export", "pruned", "out"),
    ("inspect", "model"),
    ("report", "pruned", "-o", "report.html"),
    ("solvers",),
    *[("compare", "model", "-o", "out", "--solvers", "wanda", "--sparsity", "0.5", "--text", "demo-held", *SMALL)] * 2,
]
_REAL: Any = get_command(app)


def prepare(place: Path) -> None:
    global _home
    _home = place
    furnish(place)


def _models() -> dict[str, dict[str, tuple[int, int]]]:
    found = {name: contents(_home / name) for name in ("model", "pruned", "packed")}
    for each in found.values():
        each.pop("report.html", None)  # where a report is written by default
    return found


def case(chance: random.Random, place: Path) -> str:
    usual = chance.choice(_COMMANDS)
    arguments = [str(_home / each) if each in _PLACES else each for each in usual]
    options = [each for parameter in _REAL.commands[usual[0]].params for each in parameter.opts if each[0] == "-"]
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        value = chance.choice(_ODD)
        if value in _PLACES:
            value = str(_home / value)
        if not options or chance.random() < 0.4:
            at = chance.randrange(len(arguments))
            arguments[at : at + chance.choice((0, 1, 1, 1, 2))] = [value]
        else:
            option = chance.choice(options)
            arguments += [f"{option}={value}"] if chance.random() < 0.5 else [option, value]
    before = _models()
    ended = command(arguments, place)
    assert _models() == before, f"{arguments} changed its input"
    if ended.code == 0:
        return "done"
    line = refused(ended)
    # The libraries have caches below the home, which this is.
    left = [path for path in place.rglob("*") if path.is_file() and place / ".cache" not in path.parents]
    assert not left or usual[0] == "compare", f"{arguments} left {left}: {line}"  # which keeps the cells that are done
    return "refused"
