"""Options check and coerce themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from niwaki import Calibration, Compute, Measurement
from niwaki.errors import UsageError
from niwaki.quantities import parse_range, parse_share, parse_size, parse_time
from support.models import message


def test_a_text_or_a_device_alone_will_do() -> None:
    assert Calibration.of("a.txt") == Calibration("a.txt") == Calibration.of(Path("a.txt"))
    assert Calibration.of(Calibration("a", samples=3)).samples == 3
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    assert Calibration.of(tokens).text is tokens
    assert Measurement.of("a").texts == ("a",)
    assert Measurement.of(None).texts == (None,)
    assert Measurement.of(["a", "b", Path("a")]).texts == ("a", "b")
    assert Compute.of("cuda:1") == Compute(device="cuda:1") == Compute(torch.device("cuda:1"))  # type: ignore[arg-type]
    assert Compute(dtype="bfloat16") == Compute(dtype=torch.bfloat16)  # type: ignore[arg-type]


def test_memory_is_in_bytes() -> None:
    assert Compute(max_memory="8GiB").budget == 8 * 2**30 == parse_size("8 gib")
    assert Compute(max_memory=5).budget == 5
    assert Compute().budget is None


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        (Calibration, {"samples": 0}, "samples must be 1 or more; got 0"),
        (Calibration, {"samples": "4"}, "samples must be a whole number or None; got '4'"),
        (Calibration, {"samples": 4.0}, "samples must be a whole number or None; got 4.0"),
        (Calibration, {"samples": True}, "samples must be a whole number or None; got True"),
        (Calibration, {"length": 1}, "the length of windows must be 2 or more; got 1"),
        (Calibration, {"length": "64"}, "length must be a whole number or None; got '64'"),
        (Calibration, {"seed": -1}, "the seed must be 0 or more; got -1"),
        (Calibration, {"seed": None}, "seed must be a whole number; got None"),
        (Calibration, {"order": "last"}, "order must be first or random or None; got 'last'"),
        (Measurement, {"samples": -1}, "samples must be 0 or more; got -1"),
        (Measurement, {"length": 0}, "the length of windows must be 2 or more; got 0"),
        (Measurement, {"before": "always"}, "before must be True or False; got 'always'"),
        (Measurement, {"text": ["a", 1]}, "several texts are given by their names; got ['a', 1]"),
        (Compute, {"device": None}, "device must be text; got None"),
        (Compute, {"dtype": torch.zeros(1)}, "dtype must be text; got tensor([0.])"),
        (Compute, {"tf32": "maybe"}, "tf32 must be auto, always or never; got 'maybe'"),
        (Compute, {"max_memory": 0}, "max_memory must be 1 or more; got 0"),
        (Compute, {"max_memory": 1.5}, "max_memory must be a whole number, text or None; got 1.5"),
        (Compute, {"max_memory": f"{'9' * 400}GiB"}, f"invalid size '{'9' * 76}...; try 8GiB or 500MB"),
        (Compute, {"max_memory": "much"}, "invalid size 'much'; try 8GiB or 500MB"),
    ],
)
def test_what_is_not_valid(kind: Any, wrong: dict[str, Any], said: str) -> None:
    assert message(lambda: kind(**wrong)) == said


def test_what_is_not_used_is_not_taken() -> None:
    Compute(device="cpu", dtype="float32").only("shrink", "device", "dtype")
    said = message(lambda: Compute(max_memory=5).only("shrink", "device", "dtype"))
    assert said == "shrink does not use max_memory; got max_memory=5"
    assert "one text at a time; got 2" in message(lambda: Measurement(["a", "b"]).only_text("evaluate"))
    assert "one text at a time; got 0" in message(lambda: Measurement(()).only_text("evaluate"))


@pytest.mark.parametrize("given", [0.25, "0.25", "25%", " 25 % ", ".25", "2.5e1 %"])
def test_shares(given: float | str) -> None:
    assert parse_share("neurons", given) == 0.25


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: parse_share("neurons", 25), "got 25; did you mean 0.25 (25 %)?"),
        (
            lambda: parse_share("heads", "60"),
            "heads is a fraction, from 0 to below 1; got 60; did you mean 0.6 (60 %)?",
        ),
        (lambda: parse_share("heads", 1.5), "got 1.5"),
        (lambda: parse_share("heads", "100 %"), "got 1"),
        (lambda: parse_share("heads", "nan"), "got nan"),
        (lambda: parse_share("heads", "a half"), "such as 0.25 or 25%; got 'a half'"),
        (lambda: parse_size("8"), "8 bytes; did you mean 8GiB?"),
        (lambda: parse_size(" 8000 "), "8000 bytes; did you mean 8000MB?"),
        (lambda: parse_time("5"), "'5'; did you mean 5m or 5h?"),
        (lambda: parse_time("0"), "'0'; try"),
    ],
)
def test_what_may_have_been_meant(call: Callable[[], object], said: str) -> None:
    assert said in message(call)


def test_ranges() -> None:
    assert parse_range(" 0:2 ") == (0, 2)
    for text in ("", "1", ":2", "0:1:2", "a:b", "-1:1", f"0:{'9' * 5000}"):
        with pytest.raises(UsageError, match="give FROM:TO"):
            parse_range(text)
