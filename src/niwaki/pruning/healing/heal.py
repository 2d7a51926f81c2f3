"""Healing: what is left of a pruned model is trained towards the dense model's predictions."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch
from torch import Tensor

from niwaki.arguments import checked
from niwaki.errors import CalibrationError, OutputError, UnsupportedModelError, UsageError
from niwaki.files import check_space, output_errors
from niwaki.layer.tf32 import products
from niwaki.models.answers import with_answers
from niwaki.models.carried import CarriedFiles, find_carried
from niwaki.models.checkpoint.reading import Checkpoint, locate_model
from niwaki.models.checkpoint.writing import CheckpointWriter, verify
from niwaki.models.device import find_device, find_dtype, peak_memory, training_dtype
from niwaki.models.generation import device_memory
from niwaki.models.journal import Journal, digest
from niwaki.models.layout import Matrix
from niwaki.models.output import Workplace, check_output, workplace, write_config
from niwaki.models.processes import World
from niwaki.models.scales import FILE, grid_of, stored_as_usual, verify_grid
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Texts, Windows, load_tokenizer
from niwaki.options import (
    HEALING_BATCH,
    HEALING_LENGTH,
    HEALING_RATE,
    HEALING_TOKENS,
    Calibration,
    Compute,
    HealingMethod,
    Measurement,
    Text,
    parse_number,
    parse_time,
)
from niwaki.pruning import card
from niwaki.pruning.healing.objective import Logits, find_logits
from niwaki.pruning.healing.student import RANK, LowRankStudent, Student
from niwaki.pruning.healing.teacher import Lessons, teach
from niwaki.pruning.healing.training import Training, point_file
from niwaki.pruning.prune import USUAL_WINDOWS
from niwaki.pruning.request import begin_record
from niwaki.pruning.session import current_session
from niwaki.records.progress import Progress
from niwaki.records.record import Clock, HealingRecord, Perplexity, Record
from niwaki.records.wording import counted, size

#: Tokens that are held out: enough for an error that means something, and, because they are measured at each point, no
#: more than that share of those to train on, but for the smaller number.
_LEAST_HELD, _MOST_HELD, _SHARE_HELD = 2048, 8192, 1 / 50
#: Bytes of memory for each trained weight, in addition to it: its gradient, two moments, and the best so far.
_BYTES = 4 + 8 + 4
#: Bytes for each weight of a block whose changes are computed, and their gradients.
_BLOCK_BYTES = 24
#: Bytes on disk for each, in what a stopped run resumes from: it, two moments, and the best so far.
_POINT = 4 + 8 + 4
#: The pruned model's own record, in the output.
_BASE = "niwaki.base.json"
#: Above any number that makes sense, and below what a record can have.
_LIMIT = 1 << 50
#: By how much the fraction of zeros may differ from what a record says.
_OFF = 1e-3


@checked
def heal(
    pruned: str | Path,
    out: str | Path,
    teacher: str | Path,
    *,
    method: HealingMethod = "auto",
    tokens: int | str = HEALING_TOKENS,
    time: float | str | None = None,
    rate: float = HEALING_RATE,
    batch: int | str = HEALING_BATCH,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    called: str | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Trains the weights of a pruned model that are not zero, and writes the result to directory ``out``.

    Its predictions of the next token come near those of the dense model (:class:`.training.Training`). For anything
    that was pruned, by niwaki or others, with zeros or to a smaller shape: all zeros stay. The dense model is asked a
    block at a time, the pruned one is in memory as a whole, with three more float32 numbers for each weight.

    Args:
        pruned: The pruned model: a directory with config.json and safetensors, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        teacher: The dense model, likewise; one of the same vocabulary will do.
        method: "full" trains all weights that are left, with three more float32 numbers for each; "lora" adds products
            of low rank to them, in little more memory than the weights take; "norms" trains norms and biases alone.
            "auto" is "full" where memory is enough, else "lora".
        tokens: How many to train on, such as "2M". Where the text has fewer, it is used again.
        time: Seconds, or text such as "1h", that it may take in all; None for no limit. The same tokens give the same
            bytes, the same time does not.
        rate: The learning rate, relative to the root mean square of each parameter's weights.
        batch: Tokens in a step, at least one window; such as "1k".
        calibration: The text to train on, alone or as a :class:`~niwaki.options.Calibration`, whose ``samples`` are
            not used; by default in windows of 512 tokens.
        measurement: The text to measure perplexity on, as in :func:`niwaki.prune`.
        compute: The device; ``tf32`` is not used. Half precision is bfloat16, with weights in float32; "auto" is that
            also on processors with units for it (AMX), where files are in it.
        called: What the record and the model card call the pruned model, by default ``pruned``.
        restart: Discard what an interrupted run has left for ``out``, instead of resuming it.
        progress: Receives how it goes.

    Returns:
        The record, which is also in ``out/niwaki.json``; that of the pruned model is in ``out/niwaki.base.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. After the first point the same call resumes at the last one.
    """
    clock, world = Clock(), current_session().world
    progress = progress if progress and world.first else Progress()
    calibration, measurement, compute = Calibration.of(calibration), Measurement.of(measurement), Compute.of(compute)
    measurement.only_text("heal")
    calibration.only("heal", "text", "length", "order", "seed", "answers")
    compute.only("heal", "device", "dtype", "memory")
    count = parse_number(tokens) if isinstance(tokens, str) else tokens
    batch = parse_number(batch) if isinstance(batch, str) else batch
    limit = parse_time(time) if isinstance(time, str) else time
    for name, value in (("tokens", count), ("time", limit), ("rate", rate), ("batch", batch)):
        if value is not None and not 0 < value < _LIMIT:
            raise UsageError(f"{name} must be above 0 and below 2^50; got {value}")
    source = locate_model(str(pruned))
    target = check_output(source, out) if world.first else Path(out)
    progress.status(f"reading {pruned}")
    checkpoint = Checkpoint(source)
    grid = grid_of(checkpoint)
    carried = find_carried(checkpoint, target, checkpoint.size, keep=FILE if grid else "") if world.first else None
    knowing = Checkpoint(locate_model(str(teacher)))
    dense = StreamedModel(knowing, compute.device, training_dtype(compute.dtype, compute.device, knowing))
    student, method, notes = _student(checkpoint, compute, dense.dtype != torch.float32, method)
    _check_vocabulary(student, dense)
    base = _base_record(checkpoint.path)
    _check_zeros(student, dense, base)
    logits = find_logits(student)
    progress.status("reading the text to train on")
    length = calibration.length
    if length is None and all(isinstance(text, str) for text in calibration.texts):  # and no windows, which have theirs
        length = min(HEALING_LENGTH, student.window_length(None))
    usual = length or HEALING_LENGTH
    samples = math.ceil(count / usual) + _held(count, usual)
    asked = replace(calibration, samples=max(samples, len(calibration.texts)), length=length)
    written = with_answers(dense, asked, compute.budget, world, progress)
    texts = Texts.read(dense, written, measurement, USUAL_WINDOWS, fewer=True)
    student.check(texts.windows.tokens)
    windows, length = texts.windows.tokens.shape
    held = min(_held(count, length), max(1, windows // 8))
    if windows <= world.size:
        raise CalibrationError(
            f"the text to train on has {counted(windows, 'window')} of {length} tokens, one is held out, and each "
            "process needs one; give more text, or a shorter --seqlen"
        )
    record = begin_record(
        called or str(pruned),
        dense,
        texts,
        calibration,
        method="heal",
        solver={"name": "heal", "method": method, "rate": rate, "batch": batch},
        pattern=base.pattern if base else "as it came",
        mask_from=None,
        blocks=base.blocks if base else None,
        quantization=str(grid) if grid else None,
        healing=HealingRecord(str(teacher), method, count, limit, rate, batch, held * length),
    )
    record.notes += [*notes, *([stored_as_usual(grid)] if grid else [])]
    fingerprint = {
        "model": checkpoint.fingerprint(),
        "teacher": dense.checkpoint.fingerprint(),
        "calibration": texts.windows.fingerprint(),
        "text": texts.only and texts.only.fingerprint(),
        "method": method,
        "tokens": count,
        "rate": rate,
        "batch": batch,
        "device": dense.device.type,
        "dtype": record.dtype,
        "versions": record.versions,
    }
    world.check_same(fingerprint)
    clock.lap("prepare")
    with (
        products(tf32=False),
        workplace(target, fingerprint, restart) if world.first else contextlib.nullcontext() as place,
    ):
        shared = world.received(place.journal if place else Journal({}))
        journal = place.journal if place else shared
        if journal.complete:
            record = place.finished_record if place else record
        else:
            run = _Run(dense, student, logits, held, record, clock, progress, world, journal, place)
            try:
                if carried:
                    run.write(texts, measurement.before, carried)
                else:
                    run.trained(texts.windows)
            except BaseException:
                if place and place.has_more_to_come:
                    progress.stopped(0, 0)
                raise
            record = run.record
        record = world.received(record)
        if place:
            place.move()
    progress.end(record)
    return record


def check(checkpoint: Checkpoint, compute: Compute) -> None:
    """UnsupportedModelError where a pruned model of this one would not fit in memory, or could not be healed."""
    name = training_dtype(compute.dtype, compute.device, checkpoint)
    half = find_dtype(name, find_device(compute.device), checkpoint) != torch.float32
    student, *_ = _student(checkpoint, compute, half, "auto")
    find_logits(student)


@dataclass
class _Run:
    dense: StreamedModel
    student: StreamedModel
    logits: Logits  # of both
    held: int  # windows
    record: Record
    clock: Clock
    progress: Progress
    world: World
    journal: Journal
    place: Workplace | None  # of the first process
    measuring: float = 0.0  # seconds that a perplexity takes, which is measured in the end

    def __post_init__(self) -> None:
        if self.journal.blocks:
            self._resume()

    def write(self, texts: Texts, measure_before: bool, carried: CarriedFiles) -> None:
        """Trains, and writes everything; then it only has to be moved into place."""
        place, student, clock, heldout = self.place, self.student, self.clock, texts.only
        assert place
        self.progress.begin(self.record, len(student.blocks), len(student.matrices()))
        healing, checkpoint = self.record.healing, student.checkpoint
        assert healing
        if heldout and not healing.points:
            if measure_before:
                self.record.perplexity["before"] = self._perplexity(self.dense, heldout)
            pruned = self.record.perplexity["pruned"] = self._perplexity(self._opened(checkpoint.path), heldout)
            if measure_before and self.record.perplexity["before"].value > pruned.value:
                self._note(["the dense model's perplexity is higher than the pruned model's; is it the right one?"])
        place.clear([])
        trained = self.trained(texts.windows)
        carried.copy(place.directory)
        self._note(carried.notes)
        zeros, written = Counter[str](), set[str]()
        with CheckpointWriter(checkpoint, place.directory) as writer:
            for key, value in trained:
                writer.write(key, value)
                written.add(key)
                if value.ndim > 1:
                    zeros[key] += value.numel() - int(value.count_nonzero())
        for matrix in student.matrices():
            if matrix.key not in written:  # it stays as it is
                zeros[matrix.key] += _zeros(matrix, checkpoint)
        self.record.sparsity = sum(zeros.values()) / sum(matrix.size for matrix in student.matrices())
        write_config(place.directory, checkpoint.config, self.record)
        verify(place.directory, checkpoint, zeros)
        if grid := grid_of(checkpoint):
            verify_grid(place.directory, student.matrices(), grid)
        clock.lap("write")
        if heldout:
            self.record.perplexity["after"] = self._perplexity(self._opened(place.directory), heldout)
        self.record.peak_memory = peak_memory(self.dense.device)
        own, base = place.directory / "niwaki.json", place.directory / _BASE
        with output_errors(place.directory):
            if own.exists() and not base.exists():
                own.replace(base)
        card.finish(place, self.record, clock)

    def _opened(self, path: Path) -> StreamedModel:
        return StreamedModel(Checkpoint(path), str(self.dense.device), self.record.dtype)

    def _note(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.record.notes.append(note)
            self.progress.note(note)

    def _resume(self) -> None:
        earlier = Record.from_json(self.journal.record)
        assert earlier.healing
        point = earlier.healing.points[-1]
        assert self.record.healing
        earlier.healing.limit = self.record.healing.limit  # another one may be given
        self.record = replace(earlier, command=self.record.command, device=self.record.device)
        self.record.resumed.append(point.steps)
        self.clock.add(earlier.seconds)
        self.progress.note(f"resuming after {point.tokens:,} tokens, where an earlier run was interrupted")

    def _perplexity(self, model: StreamedModel, heldout: Windows) -> Perplexity:
        began = monotonic()
        measured = model.perplexity(heldout, lambda i, _: self.progress.stage(i - 1, "perplexity", 1))
        self.measuring = monotonic() - began
        self.clock.lap("perplexity")
        return measured

    def trained(self, windows: Windows) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of the checkpoint, for all that is trained; what is saved meanwhile the first process saves."""
        healing = self.record.healing
        assert healing
        if healing.method == "full":
            student = Student(self.student, self.logits, half=self.dense.dtype != torch.float32)
        else:
            student = LowRankStudent(self.student, self.logits, RANK if healing.method == "lora" else 0)
        with contextlib.ExitStack() as stack:
            place = self.place
            scratch = place.scratch if place else Path(stack.enter_context(TemporaryDirectory()))
            if place and not healing.points:
                weights = sum(value.numel() for value in student.parameters.values())
                check_space(scratch, 2 * _POINT * weights)  # for a moment there are a new point and the last one
                there = windows.tokens[self.held :].numel()
                if there < healing.tokens and healing.limit is None:
                    times = f"{healing.tokens / there:.3g} times"
                    self._note([f"the text has {there:,} tokens to train on, each of which is used {times}"])
            file = scratch / point_file(healing)
            if place and healing.points and not (file.is_file() and digest(file) in place.journal.digests):
                raise OutputError(f"{file} is missing or damaged; start over with --restart")
            lessons = Lessons(scratch, self._share(windows.tokens), student.head)

            def ask(asked: range) -> None:
                self.clock.lap("heal")
                teach(self.dense, student.head, lessons, asked, self.progress)
                self.clock.lap("teach")

            def saved(file: Path) -> None:
                assert place
                self.clock.lap("heal")
                self.record.seconds = dict(self.clock.seconds)
                with output_errors(place.directory):
                    place.save(digests=[digest(file)], record=self.record.to_json())

            self.clock.lap("prepare")
            limit = math.inf
            if healing.limit is not None:
                others = sum(spent for stage, spent in self.clock.seconds.items() if stage not in ("heal", "teach"))
                limit = max(1.0, healing.limit - others - self.measuring)
            held = self.held if place else 0
            training = Training(student, lessons, held, healing, limit, ask, scratch, saved, self.progress, self.world)
            tensors = student.tensors(training.run())
        self.clock.lap("heal")
        if healing.halved:
            how_often = counted(healing.halved, "time")
            self.record.notes.append(f"healing became NaN or infinite, and its learning rate was halved, {how_often}")
        if healing.best == 0:
            why = "no step was made" if not healing.points[-1].steps else "no point was better on what was held out"
            self._note([f"the weights are those of the pruned model: {why}"])
        return tensors

    def _share(self, tokens: Tensor) -> Tensor:
        """Those that are held out, for the first process, and this one's of the others, as many as each has."""
        # What is held out is from the end of the text, because what the model was pruned on is often from its start.
        count, world = (len(tokens) - self.held) // self.world.size, self.world
        own = tokens[: len(tokens) - self.held][world.rank :: world.size][:count]
        return torch.cat([tokens[-self.held :], own]) if world.first else own


def _base_record(path: Path) -> Record | None:
    """How a model was pruned, where niwaki did that; of a healed one how it was before."""
    for name in (_BASE, "niwaki.json"):
        if (path / name).is_file():
            return Record.load(path / name)
    return None


def _student(
    checkpoint: Checkpoint, compute: Compute, half: bool, asked: HealingMethod
) -> tuple[StreamedModel, HealingMethod, list[str]]:
    """The pruned model, what to train of it, and notes on that; UnsupportedModelError where memory is not enough."""
    model = StreamedModel(checkpoint, compute.device, "float32")
    there = device_memory(model.device) if compute.budget is None else compute.budget
    grid, matrices = checkpoint.pruning.quantization, sum(matrix.size for matrix in model.matrices())
    full = needed = model.size + (_BYTES + (2 if half else 0) + (4 if grid else 0)) * matrices
    method, notes = asked, list[str]()
    thin: HealingMethod = "norms" if grid else "lora"
    if asked == "auto":
        method = "full" if full <= there else thin
    elif asked == "lora" != thin:
        raise UnsupportedModelError(
            f"the weights of {checkpoint.path} are on a grid, which products of low rank would leave; try the method "
            "full or norms"
        )
    if method != "full":
        if half:
            model = StreamedModel(checkpoint, compute.device, "bfloat16")
        factors = 0 if method == "norms" else RANK * sum(sum(matrix.shape) for matrix in model.matrices())
        block = model.block_size // model.dtype.itemsize
        needed = model.size + (4 + _BYTES) * factors + _BLOCK_BYTES * block
        if asked == "auto":
            notes = [f"training all weights takes {size(full)} of memory, and there are {size(there)}: {thin} instead"]
    if needed > there:
        raise UnsupportedModelError(
            f"healing {checkpoint.path} with the method {method} takes {size(needed)} of memory, and there are "
            f"{size(there)}" + (f"; try the method {thin}" if method == "full" else "")
        )
    return model, method, notes


def _check_vocabulary(model: StreamedModel, teacher: StreamedModel) -> None:
    """UsageError where the two do not mean the same by a token."""
    sizes = [each.config.vocab_size for each in (model, teacher)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{teacher.checkpoint.path} has a vocabulary of {sizes[1]:,} tokens and {model.checkpoint.path} one of "
            f"{sizes[0]:,}; give the model that it was pruned from"
        )
    with contextlib.suppress(CalibrationError):  # a model may come without one
        own, other = (load_tokenizer(each.checkpoint.path).get_vocab() for each in (model, teacher))
        if own != other:
            raise UsageError(
                f"{teacher.checkpoint.path} and {model.checkpoint.path} have vocabularies of the same size and with "
                "other words; give the model that it was pruned from"
            )


def _check_zeros(model: StreamedModel, dense: StreamedModel, record: Record | None) -> None:
    """UsageError where nothing of the model was pruned, or not what ``record``, of how it was pruned, says."""
    path, matrices = model.checkpoint.path, model.matrices()
    zeros = {matrix.place: _zeros(matrix, model.checkpoint) for matrix in matrices}
    said = {(matrix.block, matrix.name) for matrix in record.matrices} if record and not record.structure else set()
    pruned = [matrix for matrix in matrices if matrix.place in said]
    if record and pruned:
        sparsity = sum(zeros[matrix.place] for matrix in pruned) / sum(matrix.size for matrix in pruned)
        if abs(sparsity - record.sparsity) > _OFF:
            raise UsageError(
                f"{path} has {100 * sparsity:.2f} % zeros and its record says {100 * record.sparsity:.2f} %; was it "
                "trained without its mask? Prune it again, or remove the record, niwaki.json"
            )
    is_smaller = [matrix.shape for matrix in matrices] != [matrix.shape for matrix in dense.matrices()]
    is_as_dense = sum(zeros.values()) < _OFF * sum(matrix.size for matrix in matrices)
    if is_as_dense and not is_smaller and not model.checkpoint.pruning.quantization:
        raise UsageError(
            f"{path} has no zeros and the shape of {dense.checkpoint.path}: nothing of it was pruned; the pruned model "
            "comes first, and the dense one is its --teacher"
        )


def _zeros(matrix: Matrix, checkpoint: Checkpoint) -> int:
    return int((matrix.read(checkpoint) == 0).sum())


def _held(tokens: int, length: int) -> int:
    """Windows to hold out of so many tokens to train on."""
    return max(1, min(_MOST_HELD, max(_LEAST_HELD, int(tokens * _SHARE_HELD))) // length)
