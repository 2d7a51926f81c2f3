"""Where a model is on this machine; imports no torch."""

import contextlib
import difflib
from importlib.resources import files
from pathlib import Path

from niwaki.checkpoints.foreign import of_file
from niwaki.errors import CheckpointError, UsageError
from niwaki.files import given_path, input_errors


def find_local(model: str) -> Path | None:
    """The directory or the GGUF file of a model that is here, "demo" for the embedded one; None for a hub id.

    UsageError where there is no such directory and it cannot be a hub id, CheckpointError where it cannot be read.
    """
    path = given_path(model)
    if model == "demo" and not path.exists():
        return Path(str(files("niwaki"))) / "data" / "model"
    if path.is_dir():
        _check_directory(path)
        return _only_gguf(path) or path
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise UsageError(of_file(path))
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith("/"):
        near = nearest(model)
        raise UsageError(f"there is no directory {model}{f'; did you mean {near}?' if near else ''}")
    return None


def nearest(model: str) -> str:
    """The directory or GGUF file of a model that is beside ``model`` and has nearly its name, "" if there is none."""
    path = given_path(model)
    with contextlib.suppress(OSError):
        names = {each.name.lower(): each for each in path.parent.iterdir()}
        for name in difflib.get_close_matches(path.name.lower(), names, n=5):
            if _may_be_model(names[name]):
                return f"{model[: -len(path.name)]}{names[name].name}"
    return ""


def _may_be_model(path: Path) -> bool:
    if not path.is_dir():
        return path.suffix == ".gguf"
    return (path / "config.json").exists() or any(path.glob("*.gguf"))


def _check_directory(path: Path) -> None:
    """CheckpointError where it cannot be listed or entered, or has a pipe or a device: some are read for ever."""
    with input_errors(path):
        odd = [each for each in path.iterdir() if each.exists() and not (each.is_file() or each.is_dir())]
    if odd:
        raise CheckpointError(f"{odd[0]} is not a file but a pipe, a socket or a device; remove it")


def _only_gguf(path: Path) -> Path | None:
    """The GGUF file that a directory without safetensors has, if it has one; UsageError where it has several."""
    with input_errors(path):
        if any(path.glob("*.safetensors")) or not (found := sorted(path.glob("*.gguf"))):
            return None
    if len(found) > 1:
        raise UsageError(
            f"{path} has several GGUF files, such as {found[0].name} and {found[1].name}; give one of them"
        )
    return found[0]
