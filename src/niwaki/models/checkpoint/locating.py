"""Where a model is."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from niwaki.errors import CheckpointError, UsageError, first_line


def locate_model(model: str) -> Path:
    """The directory of a model: itself, "demo" for the embedded one, or the local copy of a hub id.

    Of a hub repository only safetensors, JSON and tokenizer files are fetched, never pickles or code.

    UsageError where there is no such directory and it cannot be a hub id; CheckpointError where the hub does not have
    it, or cannot be reached.
    """
    if not model:
        raise UsageError("the name of the model is empty")
    path = Path(model).expanduser()
    if model == "demo" and not path.exists():
        return Path(str(files("niwaki"))) / "data" / "model"
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{model} is a file; a model is a directory or a hub id")
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith("/"):
        raise UsageError(f"there is no directory {model}")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises errors of its own, of httpx and of the OS
        reason = f"{model} is not a directory here and not available from the hub: {first_line(error)}"
        raise CheckpointError(reason) from error
