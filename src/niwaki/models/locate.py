"""Where a model is: a directory, the embedded model, a GGUF file, or a copy of what the hub has."""

from importlib.resources import files
from pathlib import Path

from niwaki.checkpoints.foreign import of_file
from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError, UsageError, raised_as
from niwaki.files import given_path, input_errors
from niwaki.models.gguf_source import as_directory


def locate_model(model: str) -> Path:
    """The directory of a model: itself, "demo" for the embedded one, or the local copy of a hub id or a GGUF file.

    The hub only gives safetensors, JSON and tokenizer files, never pickles or code. A GGUF file may be alone in a
    directory; :mod:`niwaki.models.gguf_source` converts it. UsageError where there is no such directory and it cannot
    be a hub id; CheckpointError where the hub does not have it, or cannot be reached.
    """
    path = given_path(model)
    if model == "demo" and not path.exists():
        return Path(str(files("niwaki"))) / "data" / "model"
    if path.is_dir():
        _check_directory(path)
        if (file := _only_gguf(path)) is None:
            return path
        path = file
    if path.suffix == ".gguf" and path.is_file():
        return as_directory(path)
    if path.exists():
        raise UsageError(of_file(path))
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith("/"):
        raise UsageError(f"there is no directory {model}")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.md", "LICENSE*"]
    # The hub's client raises errors of its own, of httpx and of the system.
    with raised_as(CheckpointError, f"{model} is not a directory here and not available from the hub"):
        return Path(snapshot_download(model, allow_patterns=patterns))


def check_continues(path: Path, command: str) -> None:
    """UnsupportedModelError where the model in directory ``path`` continues no text, which a ``command`` needs."""
    if read_json(path / "config.json").get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"{path} is an encoder with a decoder, and niwaki {command} is for models that continue a text; "
            "use transformers' own generate(), and niwaki eval to measure it"
        )


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
