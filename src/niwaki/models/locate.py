"""Where a model is: a directory, the embedded model, a GGUF file, or a copy of what the hub has."""

from pathlib import Path

from niwaki.checkpoints.local import find_local, missing
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.models.gguf import as_directory
from niwaki.models.structure import predicts_words


def locate_model(model: str, tokenizer: bool = True) -> Path:
    """The directory of a model: itself, "demo" for the embedded one, or the local copy of a hub id or a GGUF file.

    The hub only gives safetensors, JSON and tokenizer files, never pickles or code. A GGUF file may be alone in a
    directory; :mod:`niwaki.models.gguf` converts it, on request without its ``tokenizer``. UsageError where
    there is no such directory and it cannot be a hub id, the hub does not have it, or cannot be reached.
    """
    if (path := find_local(model)) is not None:
        return path if path.is_dir() else as_directory(path, tokenizer)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.md", "LICENSE*"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises errors of its own, of httpx and of the system
        raise UsageError(missing(model, error)) from error


def check_continues(checkpoint: Checkpoint, command: str) -> None:
    """UnsupportedModelError where the model in ``checkpoint`` continues no text, which a ``command`` needs."""
    path = checkpoint.path
    if checkpoint.config.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"{path} is an encoder with a decoder, and niwaki {command} is for models that continue a text; "
            "use transformers' own generate(), and niwaki eval to measure it"
        )
    check_predicts(checkpoint, command)


def check_predicts(checkpoint: Checkpoint, command: str) -> None:
    """UnsupportedModelError where the model in ``checkpoint`` predicts no words, which a ``command`` needs."""
    path = checkpoint.path
    if not predicts_words(path, checkpoint.entries):
        raise UnsupportedModelError(
            f"{path} has no head, and makes no predictions of words, which niwaki {command} needs"
        )
