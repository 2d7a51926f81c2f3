"""Paths that somebody gave, and room on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from niwaki.errors import OutputError
from niwaki.files import check_space, given_path, output_errors, replace_file
from support.models import message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "'' cannot be used as a path: it is empty"),
        ("~nosuch/m", "home directory"),
        ("a" * 256, "File name too long"),
        ("nowhere/" + "a" * 256, "File name too long"),
        ("a/" * 3000, "File name too long"),
        ("loop/x", "Too many levels of symbolic links"),
        ("a\0b", "null"),
        (5, "'5' cannot be used"),
    ],
)
def test_paths_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert said in message(lambda: given_path(given))


def test_paths_that_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("link").symlink_to("nowhere")
    for given in ("x", "x/y", ".", "/", "link", "link/x", "a" * 255, "é"):
        assert given_path(given) == Path(given)
    assert given_path("~/x") == tmp_path / "x"
    assert given_path("a" * 247, longer=8)
    assert "too long" in message(lambda: given_path("a" * 248, longer=8))


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "No such file" in message(lambda: given_path("x"))


def test_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    check_space(tmp_path / "not" / "there", 2**30)
    said = message(lambda: check_space(tmp_path / "x", 2**31), OutputError)
    assert said == f"no space left on disk for {tmp_path / 'x'} (1.00 GiB are free); the output needs 2.00 GiB"

    def fill() -> None:
        with output_errors(tmp_path / "not" / "there"):
            raise OSError(28, "No space left on device")

    assert "(1.00 GiB are free); the output is as large" in message(fill, OutputError)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """As /dev/null, which who may do everything could replace."""
    make(tmp_path / "taken")
    assert "it is a directory or a device" in message(lambda: replace_file(tmp_path / "taken", "{}"), OutputError)
    assert not (tmp_path / "taken").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
