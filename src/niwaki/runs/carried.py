"""The files of a model besides its weights, which the output has too: found and checked before the work begins."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from niwaki.checkpoints.foreign import PICKLE_SUFFIXES
from niwaki.checkpoints.reading import ORIGIN, PACKED_INDEX, Checkpoint, PruningConfig, pipeline
from niwaki.errors import CheckpointError
from niwaki.files import check_space, input_errors, output_errors
from niwaki.models.formats import FACTORS_FILE
from niwaki.models.scales import EMBEDDINGS, FILE as SCALES, FOLDER
from niwaki.records.recipe import RECIPE
from niwaki.records.record import FINDINGS
from niwaki.records.wording import counted, several, size
from niwaki.runs.workplace import unfinished_size

#: Names of files with other copies of the dense weights. In the output they would be stale, and as large as the model.
_WEIGHTS = re.compile(
    rf".*({'|'.join(map(re.escape, sorted(PICKLE_SUFFIXES)))}|\.safetensors|\.h5|\.msgpack|\.gguf|\.ot|\.nemo|\.tflite"
    r"|\.mlmodel|\.distcp|weights.*\.npz|[._]onnx([._]data)?(_\d+)?|\.data-\d+-of-\d+)",
    re.DOTALL,
)
#: Names of files that say where the tensors of others are.
_INDICES = re.compile(r".*\.(safetensors|bin|pth?|h5|msgpack)\.index(\..+)?\.json", re.DOTALL)
#: Names of files without weights, each with names of those of weights to which it belongs.
_BELONGING = {
    r"adapter_config\.json": r"adapter_model\..*",  # with it, transformers would load the adapter's own base model
    r"params\.json": r"consolidated\..*",
    r"openvino_.*": r"openvino_.*\.bin",
    r"checkpoint|.*\.ckpt.*\.(meta|index)": r".*\.data-\d+-of-\d+",
}
#: Ends of the names of folders that are a copy of the weights as a whole.
_PACKAGES = (".mlpackage", ".mlmodelc")
#: What stays behind, of any model.
_NEVER = {".git", ".cache", ORIGIN, PACKED_INDEX, *FINDINGS}
#: How a model was pruned before it was healed, or before other work that leaves its matrices as they were.
BASE = "niwaki.base.json"
#: What niwaki writes beside the model's files.
_OWN_FILES = {"README.base.md", "niwaki.json", BASE, RECIPE}
#: What config.json says where there are files of scales or factors, and its entry of pruning_config.
_CLAIMS = {
    SCALES: ("quantization", "weights are on a grid"),
    EMBEDDINGS: ("embeddings", "embeddings and head are on a grid"),
    FACTORS_FILE: ("pattern", "matrices are products of two factors"),
}
#: Folders in each other; making and removing them takes the stack of Python.
_DEEPEST = 100
#: Bytes for what niwaki writes about the model.
MARGIN = 1 << 24


@dataclass(frozen=True)
class CarriedFiles:
    """The files ``names`` of the directory ``source``, and those ``left`` behind, which belong to dense weights."""

    source: Path
    names: list[Path]
    left: list[Path]
    bytes_left: int

    @property
    def notes(self) -> list[str]:
        """What the record is to say."""
        if not self.left:
            return []
        # Folders as a whole, and shards as one.
        first = Counter(name.parts[0] for name in self.left)
        names = (f"{name.parts[0]}/" if first[name.parts[0]] > 1 else str(name) for name in self.left)
        groups = list(dict.fromkeys(re.sub(r"-\d{5}-of-\d{5}", "-*", name) for name in names))
        amount = f"{counted(len(self.left), 'file')}, {size(self.bytes_left)}"
        return [f"not carried over ({amount}), because they belong to the dense weights: {several(groups)}"]

    def only(self, wanted: Callable[[Path], bool]) -> "CarriedFiles":
        """The same without the files whose names are not ``wanted``."""
        return replace(self, names=[name for name in self.names if wanted(name)])

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


def claimed_files(made: PruningConfig, of_matrices: bool = True) -> set[str]:
    """The files beside the weights that config.json says there are: of embeddings, and ``of_matrices`` where wanted."""
    files = {EMBEDDINGS} if made.embeddings else set[str]()
    if of_matrices and (made.has_factors or made.quantization):
        files.add(FACTORS_FILE if made.has_factors else SCALES)
    return files


def check_claims(checkpoint: Checkpoint) -> None:
    """CheckpointError where config.json and the files of scales and factors do not say the same of the weights.

    Nothing of a model that is packed, or in a form for other programs, which have these elsewhere.
    """
    path, claimed = checkpoint.path, claimed_files(checkpoint.pruning)
    if (path / PACKED_INDEX).exists() or checkpoint.config.get("quantization_config") is not None:
        return
    for file, (entry, what) in _CLAIMS.items():
        there = (path / file).exists()
        if there and file not in claimed:
            raise CheckpointError(
                f"{path / file} is there, and pruning_config in config.json does not say that {what}; put back the "
                "config.json that it came with, or remove that file"
            )
        if file in claimed and not there:
            raise CheckpointError(
                f"{path / 'config.json'} says that {what}, and {file} is not there; put it back, or remove {entry!r} "
                "from pruning_config, if the weights were changed"
            )


def find_carried(checkpoint: Checkpoint, out: Path, weights: int = 0, keep: Collection[str] = ()) -> CarriedFiles:
    """All files of a model but weights (except ``keep``) and measurements.

    CheckpointError for a file that cannot be copied, or has a name that niwaki gives to something else; OutputError
    where ``out`` has no space for them and ``weights`` bytes, but for what an earlier run has written of them.
    """
    source = checkpoint.path
    with input_errors(source):
        own = {source / name for name in checkpoint.files}
        found = {path.relative_to(source): path for path in sorted(_files(source)) if path not in own}
        for name, path in found.items():
            _check(path, name)
        left = _of_weights(found, {checkpoint.index_name, *keep}, [path for _, path in pipeline(source) if path])
        sizes = {name: path.stat().st_size for name, path in found.items()}
    names = sorted(found.keys() - left)
    left = [name for name in left if name.as_posix() not in _CLAIMS]  # what becomes of these is said elsewhere
    check_space(out, MARGIN + weights + sum(sizes[name] for name in names) - unfinished_size(out))
    return CarriedFiles(source, names, left, sum(sizes[name] for name in left))


def _of_weights(names: Collection[Path], ours: Collection[str], modules: Collection[str]) -> list[Path]:
    """The ``names`` of files with dense weights or that belong to such, without ``ours`` and what is in ``modules``.

    A folder with weights in it is another form of the model, or what was left of its training.
    """
    inside = tuple(f"{module}/" for module in modules)
    others = [name for name in names if name.as_posix() not in ours and not name.as_posix().startswith(inside)]
    weights = {name for name in others if _WEIGHTS.fullmatch(name.name) or _INDICES.fullmatch(name.name)}
    folders = {name.parent for name in weights} - {Path()}
    beside = [name.name for name in weights if name.parent == Path()]
    belonging = [own for own, to in _BELONGING.items() if any(re.fullmatch(to, each) for each in beside)]
    return [
        name
        for name in others
        if name in weights
        or name.parent in folders
        or any(part.endswith(_PACKAGES) for part in name.parts)
        or any(re.fullmatch(own, str(name)) for own in belonging)
    ]


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
