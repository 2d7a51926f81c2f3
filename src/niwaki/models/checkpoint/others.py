"""The files of a model directory that are not weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from niwaki.files import output_errors
from niwaki.models.checkpoint.reading import PICKLE_SUFFIXES

#: Other copies of the dense weights. In the output they would be stale, and as large as the model.
WEIGHT_SUFFIXES = PICKLE_SUFFIXES | {".safetensors", ".h5", ".msgpack", ".gguf", ".onnx"}


def copy_files(source: Path, directory: Path, shards: list[str]) -> list[str]:
    """Copies all files of ``source`` but its weights into ``directory``.

    Returns:
        The files that were not copied, with their folders: other copies of the dense weights.
    """
    left: list[str] = []
    with output_errors(directory):
        for path in sorted(_files(source, set())):
            name = path.relative_to(source)
            if name.parts[0] in {".git", ".cache"} or str(name) in shards:
                continue
            if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".bin.index.json"):
                left.append(str(name))
                continue
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)  # contents only: hub caches hold links into a blob store
    return left


def _files(directory: Path, above: set[Path]) -> Iterator[Path]:
    """All files below ``directory``, through links too, but never in a circle."""
    above = above | {directory.resolve()}
    for path in directory.iterdir():
        if not path.is_dir():
            yield path
        elif path.resolve() not in above:
            yield from _files(path, above)
