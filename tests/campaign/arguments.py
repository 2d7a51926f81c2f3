"""Commands with arguments that a tired or hostile person would give."""

from __future__ import annotations

import random
from pathlib import Path

from campaign.home import SMALL, contents, furnish
from support.forks import command, refused

_home = Path()

#: What is given where a number, a name or a path belongs.
_ODD = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1",
        "2",
        "0.5",
        "0.999",
        "1e-9",
        "1e309",
        "nan",
        "inf",
        "-0",
        "٣",
        "1" * 400,
        "0x10",
        "60 %",
    ),
    *(
        "2:4",
        "4:2",
        "0:0",
        "1:1000000",
        "per-row:0.5",
        "mixed-2:4",
        "block-4x4:0.5",
        "int4:16",
        "int4",
        "int9:3",
        "auto",
    ),
    *("wanda", "wanda+", "+exact", "wanda+swaps+exact", "admm1:rho=-1", "adam:iterations=1", "none", "None", "true"),
    *(".", "..", "/", "~", "~nosuch/m", "//", "a" * 300, "a/" * 300, "a/b", "a/b/c", "demo", "demo-held", "model"),
    *(
        "pruned",
        "packed",
        "text.txt",
        "model/config.json",
        "/dev/null",
        "/dev/full",
        "/proc/self/mem",
        "out",
        "out/out",
    ),
    *(
        "\x1b[2J",
        "\n",
        "é",
        "\u202e",
        "\udcff",
        "'",
        "%s",
        "{}",
        "[red]",
        "--",
        "--help",
        "-",
        "cpu",
        "meta",
        "cuda:99",
    ),
    *(
        "xpu",
        "mps",
        "float32",
        "bfloat16",
        "float64",
        "int8",
        "8GiB",
        "0GiB",
        "1e3",
        "1h",
        "0s",
        "c4",
        "REPO:CONFIG:SPLIT",
    ),
)
_COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prune": (
        ("model", "out", "--sparsity", "0.5", *SMALL, "--solver", "wanda"),
        (
            *("--sparsity", "--pattern", "--solver", "--set", "--effort", "--allocation", "--mask-from", "--quantize"),
            *("--blocks", "--calibration", "--samples", "--seqlen", "--windows", "--seed", "--text", "--text-samples"),
            *("--device", "--dtype", "--tf32", "--memory", "--record", "--measure"),
        ),
    ),
    "shrink": (
        ("model", "out", "--neurons", "0.25", *SMALL),
        ("--neurons", "--heads", "--blocks", "--calibration", "--samples", "--seqlen", "--text", "--record", "--dtype"),
    ),
    "eval": (
        ("model", "--text", "demo-held", "--seqlen", "32", "--text-samples", "2"),
        ("--text", "--seqlen", "--text-samples", "--tasks", "--device", "--dtype", "--record"),
    ),
    "generate": (
        ("packed", "The trees", "--tokens", "3"),
        ("--tokens", "--temperature", "--seed", "--device", "--dtype"),
    ),
    "pack": (("pruned", "out"), ()),
    "unpack": (("packed", "out"), ()),
    "export": (("pruned", "out"), ()),
    "inspect": (("model",), ()),
    "report": (("pruned", "-o", "report.html"), ("-o",)),
    "compare": (
        (
            "model",
            "-o",
            "out",
            "--solvers",
            "wanda",
            "--sparsity",
            "0.5",
            *SMALL[:6],
            "--text",
            "demo-held",
            *SMALL[6:],
        ),
        ("--solvers", "--sparsity", "--effort", "--calibration", "--samples", "--seqlen", "--text", "--budget", "-o"),
    ),
}


def prepare(place: Path) -> None:
    global _home
    _home = place
    furnish(place)


def case(chance: random.Random, place: Path) -> str:
    name = chance.choice([*_COMMANDS])
    usual, options = _COMMANDS[name]
    arguments = [str(_home / each) if each in ("model", "pruned", "packed") else each for each in usual]
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        value = chance.choice(_ODD)
        if value in ("model", "pruned", "packed", "text.txt"):
            value = str(_home / value)
        positions = len(usual) if not options or chance.random() < 0.4 else 0
        if positions:
            arguments[chance.randrange(positions)] = value
        else:
            arguments += [chance.choice(options), value]
    before = contents(_home)
    ended = command([name, *arguments], place)
    assert contents(_home) == before, f"{name} {arguments} changed its input"
    if ended.code == 0:
        return "done"
    line = refused(ended)
    # A comparison keeps the cells that are done.
    left = [] if name == "compare" else [path for path in place.rglob("*") if path.is_file()]
    assert not left, f"{name} {arguments} left {left}: {line}"
    return "refused"
