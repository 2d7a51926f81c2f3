"""Where a model is on this machine; imports no torch."""

from __future__ import annotations

import contextlib
import difflib
from importlib.resources import files
from pathlib import Path
from typing import Literal

from niwaki.checkpoints.foreign import of_file
from niwaki.errors import CheckpointError, UsageError, first_line
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


# What the Hugging Face hub says at once, before its client asks again and again; imports no torch.

#: Seconds that the hub may take to answer.
_TIMEOUT = 10.0


def refusal(kind: Literal["model", "dataset"], name: str) -> Exception | None:
    """The error that one short request for a repository meets, None if it meets none."""
    from huggingface_hub import HfApi

    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        ask(name, timeout=_TIMEOUT, expand=["sha"])
    except Exception as error:  # the library raises errors of its own, of httpx and of the OS
        return error
    return None


def is_unreachable(error: Exception | None) -> bool:
    """Whether there is no way to the hub; one that is only slow, and takes too long to answer, is another thing."""
    return isinstance(error, ConnectionError) or type(error).__name__ == "ConnectError"


def is_slow(error: Exception) -> bool:
    """Whether the hub had too little time to answer."""
    return "Timeout" in type(error).__name__


def missing(model: str, error: Exception) -> str:
    """What is said of a ``model`` that is neither a directory nor, as the ``error`` shows, on the hub."""
    if type(error).__name__ == "LocalEntryNotFoundError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # for which there is a copy to look for
    near = nearest(model)
    said = f"there is no directory {model}{f' (did you mean {near}?)' if near else ''}, and the Hugging Face hub"
    if type(error).__name__ == "OfflineModeIsEnabled":
        return f"{said} is not asked, because HF_HUB_OFFLINE is set"
    if is_unreachable(error):
        return f"{said} cannot be reached"
    if type(error).__name__ == "RepositoryNotFoundError":
        return f"{said} has no model of that name that you may read"
    return f"{said} does not provide it: {first_line(error)}"


def check_model(model: str) -> None:
    """UsageError where the hub says at once that it does not have the ``model``, and no copy of it is here."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_here = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError as error:
        raise UsageError(missing(model, error)) from error
    refused = None if is_here else refusal("model", model)
    if refused and not is_slow(refused):
        raise UsageError(missing(model, refused)) from refused
