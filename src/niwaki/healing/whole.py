"""Healing of a pruned model that is in memory as a whole."""

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from niwaki.errors import OutputError
from niwaki.files import check_space, digest, output_errors
from niwaki.healing.objective import Logits, NoHead
from niwaki.healing.points import Points, point_file
from niwaki.healing.run import HealingRun
from niwaki.healing.schedule import Schedule
from niwaki.healing.student import RANK, FactoredStudent, LowRankStudent, Student
from niwaki.healing.teacher import Lessons, teach
from niwaki.healing.training import Training, optimizer
from niwaki.healing.translation import Translation
from niwaki.models.formats import format_of
from niwaki.models.pairs import count_tokens
from niwaki.records.wording import counted

#: Bytes on disk for each, in what a stopped run resumes from: it, two moments, and the best so far.
_POINT = 4 + 8 + 4


@dataclass
class WholeRun(HealingRun):
    """Trains the whole model at once, see :class:`.training.Training`."""

    logits: Logits | NoHead = field(kw_only=True)  # of both models
    translation: Translation | None = field(kw_only=True, default=None)  # where the pruned model has other tokens

    def _train(self, tokens: Tensor) -> None:
        """What is saved meanwhile the first process saves."""
        healing, place, length = self.healing, self.run.place, tokens.shape[1]
        if healing.method == "full":
            kind = FactoredStudent if format_of(self.model.checkpoint).has_factors else Student
            student = kind(self.model, self.logits, length, half=self.dense.dtype != torch.float32)
        else:
            student = LowRankStudent(self.model, self.logits, length, RANK if healing.method == "lora" else 0)
        with contextlib.ExitStack() as stack:
            scratch = place.scratch if place else Path(stack.enter_context(TemporaryDirectory()))
            self._check_scratch(scratch, tokens, student)
            training = self._training(student, tokens, scratch)
            trained = training.run()
        self.run.clock.lap("heal")
        if healing.halved:
            how_often = counted(healing.halved, "time")
            self.record.notes.append(f"healing became NaN or infinite, and its learning rate was halved, {how_often}")
        if healing.best == 0:
            why = "no step was made" if not healing.points[-1].steps else "no point was better on what was held out"
            self.run.note(self.record, f"the weights are those of the pruned model: {why}")
        if place:
            with self._writer(place.directory) as writer:
                for key, value in student.tensors(trained):
                    writer.write(key, value)
                self.write_signless_zeros(writer)
        self.model.unload()  # perplexity takes memory next

    def _check_scratch(self, scratch: Path, tokens: Tensor, student: Student) -> None:
        """OutputError where the first process has no space for what a stopped run resumes from, or that is damaged."""
        healing, place = self.healing, self.run.place
        if not place:
            return
        if not healing.points:
            weights = sum(value.numel() for value in student.parameters.values())
            check_space(scratch, 2 * _POINT * weights)  # for a moment there are a new point and the last one
            there = count_tokens(tokens[self.held :])
            if there < healing.tokens and healing.limit is None:
                self.note_reuse(there)
            return
        file = scratch / point_file(healing)
        if not (file.is_file() and digest(file) in place.journal.digests):
            raise OutputError(f"{file} is missing or damaged; start over with --restart")

    def _training(self, student: Student, tokens: Tensor, scratch: Path) -> Training:
        healing, run, place = self.healing, self.run, self.run.place
        lessons = Lessons(scratch, self.share(tokens), student.head, self.translation)

        def ask(asked: range) -> None:
            run.clock.lap("heal")
            teach(self.dense, student.head, lessons, asked, run.progress)
            run.clock.lap("teach")

        def saved(file: Path) -> None:
            assert place
            run.clock.lap("heal")
            self.record.seconds = dict(run.clock.seconds)
            with output_errors(place.directory):
                place.save(digests=[digest(file)], record=self.record.to_json())

        run.clock.lap("prepare")
        limit = math.inf
        if healing.limit is not None:
            others = sum(spent for stage, spent in run.clock.seconds.items() if stage not in ("heal", "teach"))
            limit = max(1.0, healing.limit - others - self.measuring)
        held = self.held if place else 0
        adam, schedule, progress, world = optimizer(student), Schedule(healing.tokens, limit), run.progress, run.world
        points = Points(student, adam, lessons, held, healing, schedule, scratch, saved, progress, world)
        return Training(student, adam, lessons, healing, schedule, points, ask, progress, world)
