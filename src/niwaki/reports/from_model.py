"""What a report shows of a model itself: corners of its masks, and text that it generates."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from niwaki.errors import CheckpointError, NiwakiError
from niwaki.evaluation.generate import continue_text
from niwaki.models.checkpoint import Checkpoint, locate_model
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import load_tokenizer
from niwaki.packed.format import open_checkpoint
from niwaki.packed.load import load
from niwaki.records.record import Record
from niwaki.records.wording import kind, size
from niwaki.reports.material import Extras, MaskPicture, Sample

#: Rows and columns of a picture, and how many there are at most.
CORNER, PICTURES = 256, 8
PROMPTS = ("The old man looked at the sea and", "She opened the letter and", "In the beginning of the year")
#: Tokens that are generated after a prompt.
TOKENS = 48


def extras(directory: Path, record: Record, prompts: Sequence[str] | None = None) -> Extras:
    """Masks, where weights became zeros, and text of the pruned model in ``directory``.

    What is not available is left out with a remark that says why: the record is worth a report without it.

    Args:
        directory: Where the model is.
        record: What was done to it.
        prompts: What it is to continue; by default ``PROMPTS``, an empty list for no text.
    """
    prompts = PROMPTS if prompts is None else prompts
    remarks: list[str] = []
    masks: Sequence[MaskPicture] = ()
    samples: Sequence[Sample] = ()
    try:
        checkpoint = open_checkpoint(directory)
        if record.structure is None:
            masks = mask_pictures(checkpoint, record)
    except NiwakiError as error:
        return Extras(remarks=[f"masks and text: {error}"])
    try:
        if prompts:
            samples = text_samples(checkpoint, record, prompts, remarks)
    except NiwakiError as error:
        remarks.append(f"text: {error}")
    return Extras(masks, samples, TOKENS, remarks)


def mask_pictures(checkpoint: Checkpoint, record: Record) -> list[MaskPicture]:
    """A corner of one matrix of each kind, from the first block that was pruned to the last.

    Raises:
        NiwakiError: the model cannot be read.
    """
    known = {(m.block, m.name): m for m in StreamedModel(checkpoint, "cpu", "float32").matrices()}
    pruned = [known[m.block, m.name] for m in record.matrices if (m.block, m.name) in known]
    if not pruned:
        raise CheckpointError(f"{checkpoint.path} has none of the matrices in its record")
    kinds = list(dict.fromkeys(kind(matrix.name) for matrix in pruned))
    blocks = sorted({matrix.block for matrix in pruned})
    count = min(PICTURES, len(kinds))
    shown: list[Matrix] = []
    for index in range(count):
        of_kind = [matrix for matrix in pruned if kind(matrix.name) == kinds[index * len(kinds) // count]]
        wanted = blocks[round(index * (len(blocks) - 1) / max(1, count - 1))]
        shown.append(min(of_kind, key=lambda matrix: abs(matrix.block - wanted)))
    return [_picture(matrix, checkpoint) for matrix in shown]


def text_samples(checkpoint: Checkpoint, record: Record, prompts: Sequence[str], remarks: list[str]) -> list[Sample]:
    """What the pruned model and, where it is on this machine, the dense one say after each prompt.

    Args:
        checkpoint: The pruned model.
        record: Says what the dense one was: a directory, a hub id or "demo".
        prompts: What is given.
        remarks: Receives why there is no text of the dense model.

    Raises:
        NiwakiError: the pruned model cannot generate text.
    """
    pruned = generate(checkpoint, prompts)
    dense: list[str | None]
    try:
        dense = [*generate(_dense_model(record, checkpoint), prompts)]
    except NiwakiError as error:
        remarks.append(f"text of the dense model: {error}")
        dense = [None] * len(prompts)
    return [
        Sample(prompt, smaller.strip(), larger and larger.strip())
        for prompt, smaller, larger in zip(prompts, pruned, dense, strict=True)
    ]


def generate(checkpoint: Checkpoint, prompts: Sequence[str]) -> list[str]:
    """The most likely ``TOKENS`` tokens after each prompt, as text.

    Raises:
        CheckpointError: there is no room for the model, or transformers cannot generate text with it.
        UsageError: a prompt is empty.
    """
    needed, free = sum(entry.size for entry in checkpoint.entries.values()), _free_memory()
    # Half precision is slow on CPUs, for small models by far.
    dtype = "float32" if needed < 2**31 else str(checkpoint.config.get("dtype", "float32"))
    if free is not None and 1.2 * needed > free:
        raise CheckpointError(f"it has {size(needed)}, and {size(free)} of memory are free")
    tokenizer = load_tokenizer(checkpoint.path)
    model = load(checkpoint.path, "cpu", dtype)
    return [continue_text(model, tokenizer, prompt, TOKENS) for prompt in prompts]


def _dense_model(record: Record, pruned: Checkpoint) -> Checkpoint:
    """The dense model, if it is on this machine and has the shapes of ``pruned``; of a smaller one, its parameters."""
    name = record.model
    if name != "demo" and not Path(name).expanduser().is_dir():
        if name.count("/") != 1:
            raise CheckpointError(f"there is no directory {name} here")
        from huggingface_hub import snapshot_download

        try:  # from the cache: a report downloads nothing
            name = snapshot_download(name, local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"{name} is not on this machine") from error
    dense = open_checkpoint(locate_model(name))
    shapes, others = ({key: (entry.dtype, entry.shape) for key, entry in of.entries.items()} for of in (dense, pruned))
    if record.structure:
        parameters = sum(math.prod(shape) for _, shape in shapes.values())
        same = parameters == record.structure.parameters["before"]
    else:
        same = shapes == others
    if not same:
        raise CheckpointError(f"{name} is not the model that was pruned")
    return dense


def _picture(matrix: Matrix, checkpoint: Checkpoint) -> MaskPicture:
    kept = matrix.read(checkpoint)[:CORNER, :CORNER] != 0
    zeros = 1 - kept.float().mean().item()
    return MaskPicture(matrix.block, matrix.name, matrix.shape, (kept.shape[0], kept.shape[1]), zeros, png(kept))


def png(kept: Tensor) -> bytes:
    """(rows, columns) bool as a picture of 1 bit: transparent, and green where True, readable on white and on black."""
    rows, columns = kept.shape
    bits = torch.zeros(rows, -(-columns // 8) * 8, dtype=torch.uint8)
    bits[:, :columns] = kept
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)
    packed = (bits.view(rows, -1, 8) * weights).sum(dim=2, dtype=torch.uint8).numpy()
    lines = b"".join(b"\0" + line.tobytes() for line in packed)  # 0: the line is not filtered

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    # Width, height, 1 bit, palette; the palette; how opaque its two colours are.
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 1, 3, 0, 0, 0)),
            chunk(b"PLTE", bytes((255, 255, 255, 46, 148, 98))),
            chunk(b"tRNS", bytes((0, 255))),
            chunk(b"IDAT", zlib.compress(lines, 9)),
            chunk(b"IEND", b""),
        )
    )


def _free_memory() -> int | None:
    """Available bytes, including what the system only caches; None where it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
