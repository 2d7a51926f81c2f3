"""Models that are deleted or unmounted while they are read, at any file of theirs that is opened."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import niwaki
from niwaki.errors import CalibrationError, CheckpointError
from niwaki.options import Calibration, Compute, Measurement
from support.forks import forked
from support.models import save_model_with_tokenizer

_FEW = Calibration("demo", samples=2, length=16)
_TEXTS: dict[str, Any] = {"calibration": _FEW, "measurement": Measurement("demo-held", samples=1, length=16)}


class Watch:
    """What opens something in a directory: places in niwaki's code. At one of them, the last time, it vanishes."""

    def __init__(self) -> None:
        self.directory, self.gone = "", False
        self.places: list[str] = []
        self.at = -1
        sys.addaudithook(self)  # for good

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.directory or self.gone or event not in ("open", "os.listdir", "os.scandir"):
            return
        name = arguments[0]
        if isinstance(name, str | os.PathLike) and f"{os.path.abspath(name)}/".startswith(f"{self.directory}/"):
            self.places.append(_place())
            if len(self.places) - 1 == self.at:
                self.gone = True
                Path(self.directory).rename(f"{self.directory} that was")

    def over(self, directory: Path, at: int = -1) -> None:
        """From now on; at opening number ``at`` the directory vanishes."""
        self.directory, self.places, self.at, self.gone = str(directory), [], at, False

    def end(self) -> None:
        """Watches no more, and puts the directory back."""
        if self.gone:
            Path(f"{self.directory} that was").rename(self.directory)
        self.directory = ""


def _place() -> str:
    frame = sys._getframe()
    while frame is not None and "/niwaki/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, and the same pruned."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = save_model_with_tokenizer(tmp_path / "model")
    niwaki.prune(model, tmp_path / "pruned", 0.5, solver="magnitude", compute="cpu", **_TEXTS)
    return tmp_path


def _heal(at: Path) -> None:
    calibration, compute = Calibration("demo", length=16), Compute("cpu", "float32")
    more: dict[str, Any] = {**_TEXTS, "calibration": calibration, "compute": compute, "tokens": 64, "own_text": 0.0}
    niwaki.heal(at / "pruned", at / "out", at / "model", **more)


@pytest.mark.parametrize(
    ("which", "work"),
    [
        ("model", _heal),
        ("pruned", _heal),
        ("model", lambda at: niwaki.prune(at / "model", at / "out", 0.5, effort="fast", compute="cpu", **_TEXTS)),
        ("model", lambda at: niwaki.shrink(at / "model", at / "out", blocks=1, compute="cpu", **_TEXTS)),
        ("model", lambda at: niwaki.evaluate(at / "model", _TEXTS["measurement"], compute="cpu")),
        ("pruned", lambda at: niwaki.pack(at / "pruned", at / "out")),
    ],
    ids=["the teacher", "the student", "prune", "shrink", "evaluate", "pack"],
)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
def test_a_model_that_vanishes(place: Path, which: str, work: Callable[[Path], object]) -> None:
    """It is a model that cannot be read, whichever file is opened, and nothing that could not be written."""
    ended = forked(lambda: _vanish(place, which, work))
    assert ended.code == 0, ended.err


def _vanish(place: Path, which: str, work: Callable[[Path], object]) -> None:
    """In a fork, all of whose files are watched."""
    watch = Watch()

    def again(at: int = -1) -> None:
        for path in (place / "out", *place.glob(".out*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        watch.over(place / which, at)
        try:
            work(place)
        finally:
            watch.end()

    for _ in range(2):  # what is kept from the first time is not opened the second
        again()
    last_of = {opened: at for at, opened in enumerate(watch.places)}
    assert len(last_of) >= 6
    for at in last_of.values():
        with pytest.raises((CheckpointError, CalibrationError)) as caught:
            again(at)
        assert "\n" not in str(caught.value)
