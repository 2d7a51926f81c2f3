"""What the Hugging Face hub says at once, before its client asks again and again; imports no torch."""

from __future__ import annotations

from typing import Literal

from niwaki.checkpoints.local import nearest
from niwaki.errors import UsageError, first_line

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
