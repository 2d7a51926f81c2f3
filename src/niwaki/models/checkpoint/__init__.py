"""Model directories of safetensors; nothing here knows of transformers."""

from __future__ import annotations

from niwaki.models.checkpoint.locating import locate_model
from niwaki.models.checkpoint.reading import INDEX_NAME, Checkpoint
from niwaki.models.checkpoint.tensors import DTYPES, Entry, header_bytes, new_shard, read_header, read_json, read_tensor
from niwaki.models.checkpoint.writing import CheckpointWriter, verify

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "Checkpoint",
    "CheckpointWriter",
    "Entry",
    "header_bytes",
    "locate_model",
    "new_shard",
    "read_header",
    "read_json",
    "read_tensor",
    "verify",
]
