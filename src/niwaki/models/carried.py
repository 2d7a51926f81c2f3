"""The files of a model besides its weights, which the output has too: found and checked before the work begins."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from niwaki.errors import CheckpointError
from niwaki.files import check_space, input_errors, output_errors
from niwaki.models.checkpoint.reading import ORIGIN, PACKED_INDEX, PICKLE_SUFFIXES, Checkpoint
from niwaki.models.output import Part, unfinished_size
from niwaki.models.scales import FOLDER
from niwaki.records.record import FINDINGS

#: Other copies of the dense weights. In the output they would be stale, and as large as the model.
_WEIGHT_SUFFIXES = PICKLE_SUFFIXES | {".safetensors", ".h5", ".msgpack", ".gguf", ".onnx"}
#: What stays behind, of any model.
_NEVER = {".git", ".cache", ORIGIN, PACKED_INDEX, *FINDINGS}
#: What niwaki writes beside the model's files.
_OWN_FILES = {"README.base.md", "niwaki.json", "niwaki.base.json"}
#: Folders in each other; making and removing them takes the stack of Python.
_DEEPEST = 100
#: Bytes for what niwaki writes about the model.
MARGIN = 1 << 24


@dataclass(frozen=True)
class CarriedFiles:
    """The files ``names`` of the directory ``source``, and those ``left`` behind because they hold dense weights."""

    source: Path
    names: list[Path]
    left: list[Path]

    @property
    def notes(self) -> list[str]:
        """What the record is to say."""
        listed = ", ".join(map(str, self.left))
        return [f"not carried over, because they hold the dense weights: {listed}"] if listed else []

    def copy(self, directory: Path) -> None:
        """Copies them to ``directory``; CheckpointError where one is not there any more."""
        with output_errors(directory):
            for name in self.names:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                with input_errors(self.source / name):
                    opened = (self.source / name).open("rb")
                # Contents only: hub caches hold links into a blob store.
                with opened as read, (directory / name).open("wb") as write:
                    shutil.copyfileobj(read, write)


def find_carried(
    checkpoint: Checkpoint, out: Path, weights: int = 0, keep: str = "", part: Part = "whole"
) -> CarriedFiles:
    """All files of a model but weights (except ``keep``) and measurements.

    CheckpointError for a file that cannot be copied, or has a name that niwaki gives to something else; OutputError
    where ``out`` has no space for them and ``weights`` bytes, but for what the same ``part`` of a run has written.
    """
    source, names, left, size = checkpoint.path, [], [], MARGIN + weights
    with input_errors(source):
        for path in sorted(_files(source)):
            name = path.relative_to(source)
            if str(name) in checkpoint.files:
                continue
            _check(path, name)
            weighs = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".bin.index.json")
            if weighs and name.as_posix() != keep:
                left.append(name)
            else:
                names.append(name)
                size += path.stat().st_size
    check_space(out, size - unfinished_size(out, part))
    return CarriedFiles(source, names, left)


def _check(path: Path, name: Path) -> None:
    """Raises CheckpointError where ``path`` cannot be copied as ``name``."""
    reason, first = "", name.parts[0]
    ours = str(name) == FOLDER or first.startswith(".partial") or (first in _OWN_FILES and len(name.parts) > 1)
    if not path.is_file():
        reason = "is a link that leads nowhere" if path.is_symlink() else "is not a file"
    elif not os.access(path, os.R_OK):
        reason = "may not be read"
    elif len(name.parts) > _DEEPEST:
        reason = "is in too many folders"
    elif ours:
        reason = "has a name that niwaki gives to its own files"
    if reason:
        raise CheckpointError(f"{path} {reason}; remove or rename it: the output has all files of the model")


def _files(directory: Path) -> Iterator[Path]:
    """All that is below ``directory`` and not a directory, through links too, but never in a circle.

    CheckpointError for a link to a directory elsewhere: a slip of the model's maker would copy what is the reader's.
    """
    whole = directory.resolve()
    waiting: list[tuple[Path, frozenset[Path]]] = [(directory, frozenset())]
    while waiting:
        folder, above = waiting.pop()
        real = folder.resolve()
        if not real.is_relative_to(whole):
            raise CheckpointError(
                f"{folder} is a link to a directory outside of the model's; remove it, or copy what is there"
            )
        if real not in above:
            for path in folder.iterdir():
                if folder == directory and path.name in _NEVER:
                    continue
                if path.is_dir():
                    waiting.append((path, above | {real}))
                else:
                    yield path
