"""The bar for notebooks and programs."""

from __future__ import annotations

from pathlib import Path

import pytest

import niwaki
from support.models import random_tokens, save_model


def test_a_run_with_a_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, bar = save_model(tmp_path / "model"), niwaki.ProgressBar()
    capfd.readouterr()  # what saving the model says
    bar.estimate(700)
    for out in ("first", "second"):  # it can be used again
        niwaki.prune(model, tmp_path / out, 0.5, calibration=random_tokens(4, 32), measurement=None, progress=bar)
        said = capfd.readouterr()
        assert "done: 100 %" in said.err
        assert said.err.count("\n") == 1
        assert "note: " in said.out
        assert ("this takes about 10 min" in said.out) == (out == "first")


def test_it_names_the_part_and_the_time_left(capfd: pytest.CaptureFixture[str]) -> None:
    bar = niwaki.ProgressBar()
    bar.estimate(700)
    bar.turn(1, 2, "prune 2:4")
    bar.status("reading", 1, 4)
    assert "stage 1/2, prune 2:4: reading:  25 %" in capfd.readouterr().err
    del bar


def test_a_comparison_has_one_bar(capfd: pytest.CaptureFixture[str]) -> None:
    niwaki.compare(
        "demo",
        solvers="magnitude",
        patterns=[0.5, 0.6],
        calibration=niwaki.Calibration("demo", samples=2, length=32),
        measurement=niwaki.Measurement("demo-held", samples=2),
        progress=niwaki.ProgressBar(),
    )
    said = capfd.readouterr()
    assert said.err.count("\n") == 1
    assert "this takes" not in said.out
    assert said.out.count("magnitude") == 2
