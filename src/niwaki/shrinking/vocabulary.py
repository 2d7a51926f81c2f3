"""The stage that removes words: fewer tokens in the tokenizer, and their rows in the embeddings and the head."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from niwaki.arguments import INTERNAL, checked_names
from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import read_json
from niwaki.checkpoints.writing import Shards, write_tensors
from niwaki.effort import PLAIN_EFFORT, Effort, make_effort
from niwaki.errors import OutputError, UsageError
from niwaki.files import replace_file
from niwaki.layer.grid import AnyGrid
from niwaki.models.outside import embedding_keys, notes_of
from niwaki.models.scales import EMBEDDINGS, embedding_grid_of, embedding_places, read_embedding_scales
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import encode
from niwaki.records.record import Record, StructureRecord
from niwaki.runs.card import write_config
from niwaki.runs.duration import measuring
from niwaki.runs.stage import USUAL_WINDOWS, Run, Stage, Task, usually_asked
from niwaki.shrinking.configuration import numbers
from niwaki.shrinking.tokenizer import left_out, write_tokenizer
from niwaki.shrinking.tokens import FILES, PRIOR, ModelTokens, Size, mapped
from niwaki.texts.counting import count_tokens
from niwaki.texts.same_text import decoded, same_text
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

#: Tokens to count for each that the model has. With one, as in 1 MB of text, Gemma 3 270M lost 0.32 nats a token, and
#: with six 0.01 to 0.06 bits a byte.
_FEWEST = 4


@checked_names
@dataclass(frozen=True)
class ShrinkVocabulary(Stage):
    """The stage that removes the least needed tokens: see ``vocabulary`` of :func:`niwaki.shrink`.

    Attributes:
        size: Number of tokens to keep, such as 24576; or the fraction to remove, such as 0.5 or "50 %"; or "used" for
            all tokens of the text, and "used:0.9995" for the most common ones that make up this share of it.
        effort: How long the rest is healed, as in "best" or "fast:healing=0.5"; None for no healing.

    Raises:
        UsageError: a value is not valid, or the effort has no healing.
    """

    size: int | float | str
    effort: str | Effort | None = None
    #: Why what is left is not healed, where the effort asks for it.
    left_out: str = field(default="", metadata=INTERNAL)

    name: ClassVar[str] = "vocabulary"
    keeps_factors: ClassVar[bool] = True
    keeps_matrices: ClassVar[bool] = True
    changes_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        Size.of(self.size)
        if self.effort is not None and not self.settled_effort.healing:
            raise UsageError(
                f"where only tokens are removed an effort is for healing, and {self.effort} has none; give best, or "
                "how much, as in fast:healing=0.5"
            )

    @property
    def settled_effort(self) -> Effort:
        """The effort, of which only the healing applies."""
        effort = PLAIN_EFFORT if self.effort is None else self.effort
        return make_effort(effort) if isinstance(effort, str) else effort

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if before:
            raise UsageError(
                f"tokens are removed first, not after {before[-1].name}: what follows is fitted to text as these tokens"
            )

    def open(self, run: Run) -> "ShrinkingVocabulary":
        return ShrinkingVocabulary(self, run)

    def __str__(self) -> str:
        return str(self.size) if self.effort is None else f"{self.size}, effort {self.effort}"


class ShrinkingVocabulary(Task):
    """:class:`ShrinkVocabulary`, opened for a run: the model, the tokens that stay, and the texts."""

    texts: Texts

    def __init__(self, stage: ShrinkVocabulary, run: Run) -> None:
        checkpoint, compute = Checkpoint(run.reading), run.compute
        self.model = model = StreamedModel(checkpoint, compute.device, compute.dtype, run.budget)
        self._stage, self._tokens = stage, ModelTokens(model)
        self._measured = "both" if run.measurement.before else "after"
        run.foreseen["pruning_config"] = {}

    def read(self, run: Run) -> None:
        model, tokens, checkpoint, stage = self.model, self._tokens, self.model.checkpoint, self._stage
        self._rows, self._keys, self._file = tokens.rows, tokens.keys, tokens.file
        run.progress.status("reading the text to count tokens in")
        calibration = run.written(model, run.calibration)
        texts = Texts.read(model, calibration, run.measurement, USUAL_WINDOWS)
        (measured,) = run.measurement.texts
        names = [text for text in calibration.texts if isinstance(text, str)]
        follows = measured is None or (isinstance(measured, str) and measured in names)
        held = texts.only.tokens if texts.only and follows else None
        self.texts = run.sentences.apart(model, texts)
        self._counts = count_tokens(model, calibration, held)
        self._new = tokens.choose(self._counts.shares, Size.of(stage.size))
        self._size = sum(number < self._rows for number in self._new)
        self.tokenizer = tokens.tokenizer(self._new)
        size = checkpoint.size - (self._rows - self._size) * sum(
            checkpoint.like(key).nbytes // self._rows for key in self._keys
        )
        self._left = left_out(checkpoint.path)
        carried = run.carried(checkpoint, size)
        self.carried = carried and carried.only(lambda name: name.as_posix() not in self._left)
        self.record = self._begun(run, stage)
        run.seen = self.record.calibration

    def _begun(self, run: Run, stage: ShrinkVocabulary) -> Record:
        """The record, as far as it is known before the work."""
        removed, counts, model = self._rows - self._size, self._counts, self.model
        made = model.checkpoint.pruning.pattern
        stay = float(counts.shares[[number for number in self._new if number < self._rows]].sum())
        record = self.begin_record(
            run,
            model,
            method="shrink",
            solver={"name": "vocabulary", "size": str(stage.size), "prior": PRIOR},
            pattern=", ".join(filter(None, [made, f"{removed:,} of {self._rows:,} tokens"])),
            mask_from=None,
        )
        of = " + ".join(Path(each).name for each in record.calibration["source"].split(" + "))
        record.notes += [
            f"{counts.tokens:,} tokens of {of} were counted; the {self._size:,} that stay make up "
            f"{100 * stay:.2f} % of them",
            *filter(None, [_too_short(counts.tokens, self._rows)]),
            *counts.notes,
            *filter(None, [stage.left_out]),
            *notes_of(model),
        ]
        if self._left:
            record.notes.append(f"left out, because they have all tokens: {', '.join(sorted(self._left))}")
        if self.texts.only and run.measurement.before:
            record.notes.append(
                "perplexities before and after tokens were removed do not compare, because they are of other tokens of "
                "the same text; bits a byte do"
            )
        return record

    def heldout_after(self) -> dict[str, Windows]:
        return {name: self._both(name)[1] for name in self.texts.heldout}

    def _both(self, name: str) -> tuple[Windows, Windows]:
        """The text that is called ``name`` as tokens of the model, and as those that are left."""
        windows = self.texts.heldout[name]
        bos = None if windows.bos is None else self._new[windows.bos]
        return same_text(windows, self.model.tokenizer, self.tokenizer, bos, self.model.positions)

    def asked(self) -> dict[str, Any]:
        return {
            **usually_asked(self.model, self.texts),
            "solver": self.record.solver,
            "tokens": Windows(torch.tensor([[*self._new]]), "tokens").fingerprint(),  # which stay
            "measure": self._measured,
        }

    def expected(self, speed: float) -> float:
        return measuring(self.model, self.texts, self._measured == "both") / speed

    def work(self, run: Run) -> Record:
        record, model, place = self.record, self.model, run.place
        run.progress.begin(record, len(model.blocks), 0)
        name = next(iter(self.texts.heldout), None)
        both = None if name is None else self._both(name)
        if both and run.measurement.before:
            self._measure(run, "before", model, both[0])
        before = numbers(model.checkpoint, model.checkpoint.entries)
        fewer = (self._rows - self._size) * sum(
            math.prod(model.checkpoint.entries[key].shape[1:]) for key in self._keys
        )
        record.structure = StructureRecord(
            {"before": before, "after": before - fewer}, 0.0, vocabulary={"before": self._rows, "after": self._size}
        )
        if place and self.carried:
            self._write(run.begin_output(self.carried), record)
        directory = run.world.received(place.directory if place else None) or Path()
        run.clock.lap("write")
        smaller = StreamedModel(Checkpoint(directory), str(model.device), record.dtype)
        self._check(smaller)
        run.clock.lap("check")
        if both:
            self._measure(run, "after", smaller, both[1])
        return record

    def _write(self, directory: Path, record: Record) -> None:
        """Writes all files, the weights with one tensor in memory at a time."""
        checkpoint = self.model.checkpoint.stored
        write_tokenizer(directory, self._file, self._new)
        for name in FILES[1:]:
            if (file := directory / name).is_file():
                replace_file(file, json.dumps(self._mapped(read_json(file), file), indent=2) + "\n")
        write_config(directory, self._mapped(checkpoint.config, checkpoint.path / FILES[0]), record)
        rows = torch.tensor([number for number in self._new if number < self._rows])
        shards = Shards(directory)
        for shard in checkpoint.shards:
            like = {key: checkpoint.like(key) for key, entry in checkpoint.entries.items() if entry.shard == shard}
            like |= {
                key: torch.empty((self._size, *like[key].shape[1:]), dtype=like[key].dtype, device="meta")
                for key in self._keys & like.keys()
            }
            shards.write(shard, like, lambda key: self._read(checkpoint, key, rows))
        shards.finish()
        if grid := embedding_grid_of(checkpoint):
            self._write_scales(directory / EMBEDDINGS, grid, rows)

    def _write_scales(self, file: Path, grid: AnyGrid, rows: Tensor) -> None:
        """Writes the scales of embeddings and head on ``grid``, those of the ``rows`` that stay."""
        checkpoint = self.model.checkpoint
        scales = {
            name: read_embedding_scales(checkpoint, key, grid)[rows]
            for key in embedding_keys(self.model)
            for name in embedding_places(checkpoint, [key], grid)
        }
        write_tensors(file, scales)

    def _read(self, checkpoint: Checkpoint, key: str, rows: Tensor) -> Tensor:
        value = checkpoint.read(key)
        return value[rows] if key in self._keys else value

    def _mapped(self, values: Mapping[str, Any], where: Path) -> dict[str, Any]:
        return mapped(values, self._new.__getitem__, self._size, where)

    def _check(self, smaller: StreamedModel) -> None:
        """Raises OutputError unless the tokenizer that was written makes what was meant of the calibration text."""
        old, new = self.model.tokenizer, smaller.tokenizer
        text = "\n".join(decoded(old, window) for window in self.texts.windows.tokens[:16].tolist())
        tokens, fewer = encode(old, text), encode(new, text)
        is_text = decoded(old, tokens) == decoded(new, fewer)
        is_meant = fewer == encode(self.tokenizer, text)
        known = all(number in self._new for number in tokens)
        first = [number for number in self.texts.windows.tokens.flatten().tolist() if number in self._new][:64]
        states = [
            stream.embed(torch.tensor([ids])).hidden[0]
            for stream, ids in ((self.model, first), (smaller, [self._new[number] for number in first]))
        ]
        if not torch.equal(*states):
            raise OutputError(
                f"the same tokens have other embeddings in the written model than in {self.model.checkpoint.path}; "
                "please report this model"
            )
        if not is_text or not is_meant or (known and [self._new[number] for number in tokens] != fewer):
            raise OutputError(
                f"the written tokenizer does not split text as that of {self.model.checkpoint.path} does; please "
                "report this model"
            )
        written = smaller.config.vocab_size
        if written != self._size:
            raise OutputError(
                f"the written model has {written:,} tokens and not {self._size:,}; please report this model"
            )

    def _measure(self, run: Run, name: str, model: StreamedModel, windows: Windows) -> None:
        """Measures the perplexity of ``model`` on this process's share of ``windows``, for the record of all."""
        own = windows.of(run.world.share(torch.arange(len(windows.tokens))))
        measure = run.dense_perplexity if name == "before" else run.perplexity
        self.record.perplexity[name] = measure(model, own, shared=True)


def _too_short(counted: int, tokens: int) -> str:
    """What to note of a text of which so few tokens were counted that common ones of other texts may go; else ""."""
    if counted >= _FEWEST * tokens:
        return ""
    return (
        f"that is little for a vocabulary of {tokens:,}: tokens that are common in other texts may go; count in "
        f"{math.ceil(_FEWEST * tokens / max(1, counted))} times as much text, or more"
    )
