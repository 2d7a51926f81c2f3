"""The stage that shrinks: fewer blocks, heads, neurons or experts, and a smaller dense model on disk."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from niwaki.arguments import INTERNAL, checked_names
from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import PLAIN_EFFORT, SHRINK_EFFORT, Effort, describe as describe_effort, make_effort
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.layer.linalg import products
from niwaki.layer.unit_removal import DAMPING, flops
from niwaki.models.formats import check_one_matrix
from niwaki.models.layout import Matrix, check_dtypes
from niwaki.models.outside import notes_of
from niwaki.models.streamed import StreamedModel
from niwaki.quantities import NOTHING_TO_REMOVE, parse_parameters, parse_share
from niwaki.records.record import Record
from niwaki.runs.card import pruning_config
from niwaki.runs.duration import measuring, pruning
from niwaki.runs.stage import USUAL_WINDOWS, Run, Stage, Task, usually_asked
from niwaki.shrinking.configuration import Tensors
from niwaki.shrinking.experts import expert_removal
from niwaki.shrinking.search import Combinations, kinds_of, most_blocks, operations_of_runs
from niwaki.shrinking.units import Removal, head_removal, mlps, neuron_removal, notes_on, removed_of
from niwaki.shrinking.walk import Removing
from niwaki.texts.texts import Texts

#: What is removed from each block by shares.
SHARES = ("neurons", "heads", "experts")


@checked_names
@dataclass(frozen=True)
class Shrink(Stage):
    """The stage that removes blocks, heads, neurons or experts: see :func:`niwaki.shrink` for its arguments."""

    blocks: int = 0
    neurons: float | str = 0.0
    heads: float | str = 0.0
    experts: float | str = 0.0
    parameters: float | str | None = None
    effort: str | Effort | None = None
    #: A note on what is not done of what was asked for.
    left_out: str = field(default="", metadata=INTERNAL)

    name: ClassVar[str] = "shrink"

    def __post_init__(self) -> None:
        super().__post_init__()
        gone = self.blocks or any(self.shares.values())
        if self.parameters is not None:
            parse_parameters(self.parameters)
            if gone:
                raise UsageError("parameters says how much is left, and then blocks, neurons and heads follow from it")
        elif not gone:
            raise UsageError(NOTHING_TO_REMOVE)

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of units to remove, by kind."""
        return {name: parse_share(name, getattr(self, name)) for name in SHARES}

    @property
    def removes_blocks(self) -> bool:
        return self.blocks > 0

    @property
    def asked_effort(self) -> Effort:
        """The effort that was given, or the usual one."""
        # What fits to more text gain where experts go was not measured.
        usual = PLAIN_EFFORT if self.shares["experts"] else SHRINK_EFFORT
        effort = usual if self.effort is None else self.effort
        return make_effort(effort) if isinstance(effort, str) else effort

    @property
    def settled_effort(self) -> Effort:
        """The effort, with the epochs that it has where all matrices are treated alike."""
        return self.effort_for(predicts=True)

    def effort_for(self, predicts: bool, writes: bool = True) -> Effort:
        """The effort for a model that ``predicts`` the tokens of its text, and ``writes`` text, or does not."""
        settled = self.asked_effort.settled(shares_zeros=False, predicts=predicts, writes=writes)
        return dataclasses.replace(settled, plan=dataclasses.replace(settled.plan, allocation="uniform", together=0))

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if others := [stage.name for stage in before if not stage.changes_tokens]:
            raise UsageError(
                f"shrink comes first, not after {others[-1]}: it fits what is left without regard to zeros"
            )

    def open(self, run: Run) -> "Shrinking":
        return Shrinking(self, run)

    def __str__(self) -> str:
        given = {"blocks": self.blocks, **self.shares}
        numbers = [f"{name} {value:g}" for name, value in given.items() if value]
        others = {"parameters": self.parameters, "effort": self.effort}
        return ", ".join([*numbers, *(f"{name} {value}" for name, value in others.items() if value is not None)])


def _check_pairs(model: StreamedModel, stage: Shrink) -> None:
    """UnsupportedModelError for what is not removed of encoders with decoders."""
    if model.pairs is None:
        return
    if model.config is not model.model.config:
        what = "parts"
    else:
        what = next((kind for kind in ("heads", "experts") if stage.shares[kind]), "")
    if what:
        raise UnsupportedModelError(
            f"{model.checkpoint.path}: {what} of this kind of encoder with a decoder cannot be "
            "removed; prune it, or quantize it"
        )


class Shrinking(Task):
    """:class:`Shrink`, opened for a run: the model, what is removed from each of its blocks, and the texts."""

    texts: Texts

    def __init__(self, stage: Shrink, run: Run) -> None:
        checkpoint, compute, shares = Checkpoint(run.reading), run.compute, stage.shares
        check_one_matrix(checkpoint, "shrinking")
        self.model = model = StreamedModel(checkpoint, compute.device, compute.dtype, run.budget)
        depth, self._blocks = len(model.blocks), stage.blocks
        _check_pairs(model, stage)
        self._left_out = [stage.left_out] if stage.left_out else []
        self._effort = stage.effort_for(model.has_head and not model.sees_ahead, writes=model.pairs is None)
        self.tensors = Tensors.of(model)
        self._combinations = self._of_size(stage.parameters)
        most, kinds = most_blocks(model), len({*kinds_of(model)})
        if not 0 <= stage.blocks <= most:
            stay = f", one of each of the {kinds} kinds stays" if kinds > len(model.starts) else ""
            raise UsageError(f"blocks {stage.blocks} of {depth}: from 0 to {most} can be removed{stay}")
        self.columns = [
            make(model, shares[kind])
            for kind, make in (("heads", head_removal), ("neurons", neuron_removal))
            if shares[kind]
        ]
        self.experts = expert_removal(model, shares["experts"]) if shares["experts"] else None
        if self.experts and run.world.size > 1:
            raise UsageError("experts are removed by one process; start niwaki without torchrun")
        removals: list[Removal] = [*self.columns, *([self.experts] if self.experts else [])]
        output = self.tensors.size(model, removals, depth - stage.blocks)
        self.carried = run.carried(checkpoint, output, scratch=self._scratch_size(removals))
        check_dtypes(checkpoint, (matrix.key for removal in removals for matrix in removal.matrices))
        self._measured = "both" if run.measurement.before else "after"
        self._stage, self._removals = stage, removals
        for each in removals:
            run.foreseen |= each.config
        run.foreseen["pruning_config"] = pruning_config(self._begun(run))

    def read(self, run: Run) -> None:
        run.progress.status("reading the text to calibrate on")
        written = run.written(self.model, run.calibration)
        self.texts = run.sentences.apart(self.model, Texts.read(self.model, written, run.measurement, USUAL_WINDOWS))
        self.record = self._begun(run)
        run.seen = self.record.calibration

    def _of_size(self, parameters: float | str | None) -> Combinations | None:
        """What can be removed for a model of so many parameters; None where that is not asked for."""
        if parameters is None:
            return None
        every, stay = Combinations.all_of(self.model, self.tensors)
        self._left_out += stay
        given = parse_parameters(parameters)
        combinations = dataclasses.replace(every, target=int(given * every.everything if given < 1 else given))
        combinations.check()
        return combinations

    def _scratch_size(self, removals: Sequence[Removal]) -> int:
        """Bytes of the matrices that change, which are kept until all is written."""
        sized = self._combinations
        fitted = {matrix.entry for each in (sized.kinds if sized else removals) for matrix in each.matrices}
        matrices = self.model.matrices()
        changed = matrices if self._effort.fit.epochs else [each for each in matrices if each.entry in fitted]
        blocks = sized.most_blocks if sized else self._blocks
        has_gaps = blocks and not self._effort.fit.epochs
        repaired = max((self._bytes(each) for each, _ in mlps(matrices)), default=0) if has_gaps else 0
        # Each removed block may have one before it that changes.
        return sum(map(self._bytes, changed)) + blocks * repaired

    def _bytes(self, matrix: Matrix) -> int:
        return matrix.size * self.model.checkpoint.dtype(matrix.key).itemsize

    def _begun(self, run: Run) -> Record:
        """The record, as far as it is known before the work."""
        stage, removals = self._stage, self._removals
        depth, shares, sized = len(self.model.blocks), stage.shares, stage.parameters is not None
        effort = describe_effort(self._effort, stage.asked_effort) if self._effort != Effort() else {}
        record = self.begin_record(
            run,
            self.model,
            method="shrink",
            solver={
                "name": "shrink",
                "blocks": stage.blocks,
                **shares,
                **({"parameters": stage.parameters} if sized else {}),
                "damping": DAMPING,
            },
            effort=effort,
            pattern=f"parameters {stage.parameters}" if sized else removed_of(stage.blocks, depth, removals),
            mask_from=None,
            flops=(depth - stage.blocks)
            * sum(flops(*each.matrices[0].shape, each.size * each.count) for each in self.columns),
        )
        record.notes += [*self._left_out, *notes_of(self.model, is_smaller=True)]
        for each in removals:
            record.notes += notes_on(each, shares[each.kind])
        return record

    def asked(self) -> dict[str, Any]:
        return {
            **usually_asked(self.model, self.texts),
            "solver": self.record.solver,
            "effort": describe_effort(self._effort),
            "measure": self._measured,
        }

    def expected(self, speed: float) -> float | None:
        samples, sized = self.texts.samples, self._combinations
        if not isinstance(samples, Tensor):  # images are of any size
            return None
        return (
            measuring(self.model, self.texts, self._measured == "both")
            + (sized.operations() if sized else operations_of_runs(self.model, self._blocks))
            + pruning(self.model, self._effort, samples.numel(), self.record.flops)
        ) / speed

    def extent(self, run: Run) -> tuple[int, int]:
        return run.journal.blocks, len(self.model.blocks)

    def work(self, run: Run) -> Record:
        record = run.resumed(self.record, len(self.model.blocks))
        removed = self.columns, self.experts, self._combinations
        removal = Removing(self.model, *removed, self.tensors, self._effort, record, run)
        with products(tf32=False):
            removal.write(self.texts.shared(run.world), run.measured.before, self._blocks, self.carried)
        return record.after(run.earlier) if run.earlier else record
