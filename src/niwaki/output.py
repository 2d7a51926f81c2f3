"""The directory that a run writes: there when all of it is, and not before."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from niwaki import __version__
from niwaki.checkpoint import Checkpoint, output_errors
from niwaki.errors import UsageError
from niwaki.record import Record, set_usual_mode, write_json


def check_output(source: Path, out: Path, record_to: Path | None) -> Path:
    """``out`` as an absolute path, after a look at whether it can be written at the end of the run.

    Raises:
        UsageError: it is not empty, or inside the model's directory, or the record's file cannot be one.
    """
    out = out.expanduser().resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty directory; choose another or remove it")
    if source.resolve() in [out, *out.parents]:
        raise UsageError(f"{out} is inside the model's own directory; choose another place")
    if record_to is not None:
        file = record_to.expanduser().absolute()
        if file.is_dir() or any(parent.is_file() for parent in file.parents):
            raise UsageError(
                f"{record_to} cannot be the record's file: a directory is one, or a file in its path"
            )
    return out


@contextlib.contextmanager
def output_directory(out: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``out`` if all goes well and goes away if not.

    A directory that is there already (an empty one) may be a mount point or somebody's working directory:
    it stays, the temporary one is made inside it and its contents move up.
    """
    there = out.exists()
    parent = out if there else out.parent
    made = next((p for p in reversed([parent, *parent.parents]) if not p.exists()), None)
    with output_errors(out):
        parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=parent))
    try:
        yield directory
        with output_errors(out):
            if there:
                for path in sorted(directory.iterdir()):
                    path.rename(out / path.name)
                directory.rmdir()
            else:
                set_usual_mode(directory, 0o777)
                directory.rename(out)
    except BaseException:
        shutil.rmtree(made or directory, ignore_errors=True)
        raise


def write_config(directory: Path, checkpoint: Checkpoint, record: Record) -> None:
    """``config.json`` with ``pruning_config``, an extra key that transformers keeps and ignores.

    Not ``quantization_config``: with a sparsity format there, transformers loads random weights.
    """
    config = {
        **checkpoint.config,
        "pruning_config": {
            "library": "niwaki",
            "version": __version__,
            "method": record.method,
            "solver": record.solver,
            "mask_from": record.mask_from,
            "pattern": record.pattern,
            "sparsity": round(record.sparsity, 6),
        },
    }
    write_json(directory / "config.json", json.dumps(config, indent=2) + "\n")
