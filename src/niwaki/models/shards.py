"""Whole tensors into new files of safetensors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from niwaki.errors import OutputError
from niwaki.files import output_errors, set_usual_mode, write_json
from niwaki.models.checkpoint import INDEX_NAME


class Shards:
    """Writes tensors to several safetensors files in ``directory``, and their index; OutputError where it cannot."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._size = 0
        self._shards: dict[str, str] = {}

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Writes the file ``name``."""
        path = self._directory / name
        with output_errors(self._directory):
            try:
                save_file(tensors, path, {"format": "pt"})
            except SafetensorError as error:
                if number := re.search(r"os error (\d+)", str(error)):  # such as a full disk
                    raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
                raise OutputError(f"cannot write {path}: {error}") from error
            set_usual_mode(path, 0o666)  # the library makes it private
            with path.open("r+b") as file:
                os.fsync(file.fileno())
        self._size += sum(value.nbytes for value in tensors.values())
        self._shards |= dict.fromkeys(tensors, name)

    def finish(self) -> None:
        """Writes the index, if there is more than one file."""
        if len(set(self._shards.values())) > 1:
            index = {"metadata": {"total_size": self._size}, "weight_map": self._shards}
            write_json(self._directory / INDEX_NAME, json.dumps(index, indent=2) + "\n")
