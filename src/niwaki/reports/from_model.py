"""What a report shows of a model itself: corners of its masks, and text that it generates."""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NiwakiError
from niwaki.evaluation.generate import continue_text
from niwaki.files import given_path
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.packed.format import open_checkpoint
from niwaki.packed.load import load
from niwaki.records.record import Record
from niwaki.records.wording import kind, size
from niwaki.reports.material import Extras, MaskPicture, Sample

CORNER, PICTURES = 256, 8  # rows and columns of a picture, and how many there are at most
PROMPTS = ("The old man looked at the sea and", "She opened the letter and", "In the beginning of the year")
TOKENS = 48  # that are generated after a prompt


def extras(directory: Path, record: Record, prompts: Sequence[str] | None = None) -> Extras:
    """Masks, where weights became zeros, and how the pruned model in ``directory`` continues ``prompts``.

    These are by default ``PROMPTS``. What is not available is left out with a remark: the record is worth a report.
    """
    prompts = PROMPTS if prompts is None else prompts
    masks: list[MaskPicture] = []
    samples: list[Sample] = []
    wanted, remarks = "masks and text", []
    try:
        checkpoint = open_checkpoint(directory)
        masks = mask_pictures(checkpoint, record) if not record.only_shrinks else []
        if prompts:
            wanted = "text"
            pruned = generate(checkpoint, prompts)
            samples = [Sample(prompt, text.strip(), None) for prompt, text in zip(prompts, pruned, strict=True)]
            wanted = "text of the dense model"
            dense = generate(_dense_model(record, checkpoint), prompts)
            samples = [replace(sample, dense=text.strip()) for sample, text in zip(samples, dense, strict=True)]
    except NiwakiError as error:
        remarks = [f"{wanted}: {error}"]
    return Extras(masks, samples, TOKENS, remarks)


def mask_pictures(checkpoint: Checkpoint, record: Record) -> list[MaskPicture]:
    """A corner of one matrix of each kind, from the first block that was pruned to the last."""
    known = {(m.block, m.name): m for m in StreamedModel(checkpoint, "cpu", "float32").matrices()}
    pruned = [known[m.block, m.name] for m in record.matrices if (m.block, m.name) in known]
    if not pruned:
        raise CheckpointError(f"{checkpoint.path} has none of the matrices in its record")
    kinds = list(dict.fromkeys(kind(matrix.name) for matrix in pruned))
    blocks = sorted({matrix.block for matrix in pruned})
    count = min(PICTURES, len(kinds))
    pictures = []
    for index in range(count):
        of_kind = [matrix for matrix in pruned if kind(matrix.name) == kinds[index * len(kinds) // count]]
        wanted = blocks[round(index * (len(blocks) - 1) / max(1, count - 1))]
        matrix = min(of_kind, key=lambda matrix: abs(matrix.block - wanted))
        kept = matrix.read(checkpoint)[:CORNER, :CORNER] != 0
        rows, columns = kept.shape
        zeros = 1 - kept.float().mean().item()
        pictures.append(MaskPicture(matrix.block, matrix.name, matrix.shape, (rows, columns), zeros, png(kept)))
    return pictures


def generate(checkpoint: Checkpoint, prompts: Sequence[str]) -> list[str]:
    """The most likely ``TOKENS`` tokens after each prompt, as text.

    Raises CheckpointError where the model has no room or transformers cannot use it, UsageError for an empty prompt.
    """
    needed = sum(entry.size for entry in checkpoint.entries.values())
    free = psutil.virtual_memory().available  # with what the system only caches
    # Half precision is slow on CPUs, for small models by far.
    dtype = "float32" if needed < 2**31 else str(checkpoint.config.get("dtype", "float32"))
    if 1.2 * needed > free:
        raise CheckpointError(f"it has {size(needed)}, and {size(free)} of memory are free")
    tokenizer = load_tokenizer(checkpoint.path)
    model = load(checkpoint.path, "cpu", dtype)
    return [continue_text(model, tokenizer, prompt, TOKENS) for prompt in prompts]


def _dense_model(record: Record, pruned: Checkpoint) -> Checkpoint:
    """The dense model, if it is on this machine and has the shapes of ``pruned``; of a smaller one, its parameters."""
    name = record.model
    if name != "demo" and not given_path(name).is_dir():
        if name.count("/") != 1:
            raise CheckpointError(f"there is no directory {name} here")
        from huggingface_hub import snapshot_download

        try:  # from the cache: a report downloads nothing
            name = snapshot_download(name, local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"{name} is not on this machine") from error
    dense = open_checkpoint(locate_model(name))
    shapes, others = ({key: (entry.dtype, entry.shape) for key, entry in of.entries.items()} for of in (dense, pruned))
    if structure := record.structure:
        same = sum(math.prod(shape) for _, shape in shapes.values()) == structure.parameters["before"]
    else:
        same = shapes == others
    if not same:
        raise CheckpointError(f"{name} is not the model that was pruned")
    return dense


def png(kept: Tensor) -> bytes:
    """(rows, columns) bool as a picture of 1 bit: transparent, and green where True, readable on white and on black."""
    rows, columns = kept.shape
    # 0: the line is not filtered.
    lines = b"".join(b"\0" + line.tobytes() for line in np.packbits(kept.numpy(), axis=1))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 1, 3, 0, 0, 0))  # 1 bit, with a palette
    palette = chunk(b"PLTE", bytes((255, 255, 255, 46, 148, 98))) + chunk(b"tRNS", bytes((0, 255)))  # and how opaque
    pixels = chunk(b"IDAT", zlib.compress(lines, 9))
    return b"\x89PNG\r\n\x1a\n" + header + palette + pixels + chunk(b"IEND", b"")
