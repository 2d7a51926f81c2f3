"""The walk over the blocks of a model that shrinks: units chosen and removed, what is left fitted and written."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import Shards
from niwaki.effort import Effort
from niwaki.errors import named
from niwaki.layer.problem import LayerProblem
from niwaki.layer.unit_removal import remove_units
from niwaki.models.block import DecoderBlock
from niwaki.models.formats import sparsity
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.outside import generation_without_drafts
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import Fit, samples_to_fit, trained_matrices, trained_weights
from niwaki.records.record import FEW_ZEROS, MatrixRecord, Record, StructureRecord
from niwaki.runs.card import write_config
from niwaki.runs.carried import CarriedFiles
from niwaki.runs.stage import Run, joined
from niwaki.runs.store import BlockStore, Kept, kept_once
from niwaki.shrinking.configuration import Tensors, check_outputs, configuration, numbers, smaller_blocks
from niwaki.shrinking.experts import ExpertRemoval, choose_experts, fit_experts
from niwaki.shrinking.search import Combinations, ShrinkPlan, planned
from niwaki.shrinking.trial import bridge, last_matrix
from niwaki.shrinking.units import Removal, notes_on, removed_of
from niwaki.texts.texts import Texts

# The tensors of a block with fewer units: as they are written, and as the smaller block in memory has them.


class BlockTensors:
    """The tensors of block ``index`` of ``model`` as they will be, read when they are written.

    ``names`` are its keys with what they become, see :func:`.configuration.tensors_of_blocks`.
    """

    def __init__(self, model: StreamedModel, index: int, names: dict[str, str]) -> None:
        self._model, self._index, self._names = model, index, dict(names)
        self._values: dict[str, dict[int | None, Tensor]] = defaultdict(dict)  # by key and index there
        self._smaller: dict[str, dict[int | None, Tensor]] = defaultdict(dict)  # likewise, when units are left out
        self._changes: dict[str, list[Callable[[Tensor], Tensor]]] = defaultdict(list)
        self._units: dict[str, Callable[[Tensor], Tensor]] = {}  # by parameter, what leaves out units
        #: Of matrices that were replaced: the weights written, how many were zero before, and no longer are.
        self.counts: Counter[str] = Counter()

    def replace(self, matrix: Matrix, stored: Tensor, is_smaller: bool = False) -> None:
        """``matrix`` becomes ``stored``, in the layout of the checkpoint: with all units, or as it ``is_smaller``."""
        (self._smaller if is_smaller else self._values)[matrix.key][matrix.index] = stored

    def keep(self, removal: Removal, kept: Tensor) -> None:
        """Only the units in the mask ``kept`` (units,) stay. Experts get numbers without gaps."""
        numbers = {expert: number for number, expert in enumerate(kept.nonzero().squeeze(1).tolist())}
        layout = self._model.layout
        self._units |= self._without(removal, kept)
        for parameter in removal.parameters[self._index]:
            for key, expert in layout.experts(self._model.places[self._index] + parameter.name).items():
                if expert is None:
                    self._changes[key].append(self._units[parameter.name])
                elif expert in numbers:
                    head, number, tail = self._names[key].rpartition(f".{expert}.")
                    self._names[key] = f"{head}{number.replace(str(expert), str(numbers[expert]))}{tail}"
                else:
                    del self._names[key]

    def write(self, number: int, file: str, shards: Shards) -> None:
        """Writes them to ``file``, one at a time, as those of the block that is ``number`` now."""
        checkpoint, keys = self._model.checkpoint, {name.format(number): key for key, name in self._names.items()}

        def read(name: str) -> Tensor:
            key, value = keys[name], checkpoint.read(keys[name])
            zeros = self._left(key, value == 0) if key in self._values or key in self._smaller else None
            value = self._changed(key, value)
            if zeros is not None:
                revived = int((zeros & (value != 0)).sum())
                self.counts.update(weights=value.numel(), zeros=int(zeros.sum()), revived=revived)
            for values in (self._values, self._smaller):
                values.pop(key, None)  # frees them
            return value

        shards.write(file, {name: self._changed(key, checkpoint.like(key)) for name, key in keys.items()}, read)

    def _changed(self, key: str, value: Tensor) -> Tensor:
        """What ``value``, the tensor under ``key``, becomes, in its own memory if possible."""
        for index, stored in self._values.get(key, {}).items():
            (value if index is None else value[index]).copy_(stored)
        value = self._left(key, value)
        for index, stored in self._smaller.get(key, {}).items():
            (value if index is None else value[index]).copy_(stored)
        return value

    def _left(self, key: str, value: Tensor) -> Tensor:
        """What is left of ``value``, in the shape of the tensor under ``key``, without the units that go."""
        for change in self._changes.get(key, ()):
            value = change(value)
        return value

    def move(self, block: DecoderBlock, smaller: nn.Module, removal: Removal, kept: Tensor) -> DecoderBlock:
        """The ``smaller`` block of the experts in the mask ``kept`` with the weights of ``block``, which has none then.

        Those of experts are read again, so that both blocks do not have to fit in memory.
        """
        values = block.module.state_dict()
        free(block.module)
        units = self._units | self._without(removal, kept)
        stacks = [name for name, value in values.items() if name in units and value.ndim > 2]
        for name in stacks:
            del values[name]
        weights = {name: units[name](value) if name in units else value for name, value in values.items()}
        experts = kept.nonzero().squeeze(1).tolist()
        for name in stacks:
            weights[name] = block.layout.read_experts(block.path + name, experts).to(block.device)
        smaller.load_state_dict(weights, strict=False, assign=True)
        numbers = {None: None, **{expert: number for number, expert in enumerate(experts)}}
        matrices = [replace(each, expert=numbers[each.expert]) for each in block.matrices if each.expert in numbers]
        return replace(block, module=smaller, matrices=matrices)

    def _without(self, removal: Removal, kept: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
        """What leaves out units of each parameter, by its name."""
        return {each.name: partial(each.without, kept=kept) for each in removal.parameters[self._index]}


def free(block: nn.Module) -> None:
    """Frees the weights of a block."""
    weights = {name: torch.empty_like(value, device="meta") for name, value in block.state_dict().items()}
    block.load_state_dict(weights, strict=False, assign=True)


# What shrinking does to a block, kept until the smaller model is whole.


@dataclass
class Changes(Kept):
    """The units of a block that stay, and the weights of matrices with all of their units."""

    kept: dict[str, Tensor] = field(default_factory=dict)  # by kind: (units,) bool
    weights: dict[str, Tensor] = field(default_factory=dict)  # by the name of a matrix, as the checkpoint has it
    moved: dict[str, Tensor] = field(default_factory=dict)  # likewise, of the smaller block that experts moved to


@dataclass
class Removing:
    """The walk over the blocks: inputs in, units chosen and removed, what is left fitted and written."""

    model: StreamedModel
    columns: list[Removal]  # or what the plan decides, by the combinations
    experts: ExpertRemoval | None
    combinations: Combinations | None
    tensors: Tensors
    effort: Effort
    record: Record
    run: Run
    #: By kind, for each block that stays, the units that were removed.
    removed: dict[str, list[list[int]]] = field(default_factory=lambda: {"heads": [], "neurons": [], "experts": []})
    #: Of all blocks, those of :class:`BlockTensors`.
    counts: Counter[str] = field(default_factory=Counter)
    _importance: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = BlockStore(self.run)

    @property
    def removals(self) -> list[Removal]:
        """All removals: of heads, of neurons and of experts."""
        return [*self.columns, *([self.experts] if self.experts else [])]

    def write(self, texts: Texts, measure_before: bool, count: int, carried: CarriedFiles | None) -> None:
        """Removes ``count`` blocks and all units, writes the model, and checks it."""
        model, record, run, place = self.model, self.record, self.run, self.run.place
        windows, heldout, depth = texts.windows, texts.only, len(model.blocks)
        mixed = sum(path is not None for path in self.experts.paths) if self.experts else 0
        kinds = self.combinations.kinds if self.combinations else self.columns
        run.progress.begin(record, depth, (depth - count) * len(kinds) + mixed)
        if heldout and measure_before and "before" not in record.perplexity:
            record.perplexity["before"] = run.dense_perplexity(model, heldout, shared=True)
        columns, sized = self.columns, self.combinations
        plan = kept_once(
            run, ShrinkPlan, lambda: planned(model, self.effort, windows, columns, count, sized, record, run)
        )
        self._importance = plan.importance
        if self.combinations:
            self.columns = self.combinations.removals(plan.units)
            record.pattern = removed_of(len(plan.dropped), depth, self.columns)
            run.note(record, *(note for each in self.columns for note in notes_on(each)))
        kept = [index for index in range(depth) if index not in plan.dropped]
        left, outside = self.tensors.left, self.tensors.outside
        shards = None
        if place and carried:
            output = run.begin_output(carried)
            if any(each.is_draft for each in left):
                generation_without_drafts(output)
            values = configuration(model, kept, self.removals, left)
            write_config(output, values, record)
            shards = Shards(output)
        directory = run.world.received(place.directory if place else None) or Path()
        smaller_modules = smaller_blocks(model, directory, kept, self.removals)
        if shards:
            shards.write(_shard(0, kept), {key: model.checkpoint.like(key) for key in outside}, model.checkpoint.read)
        run.clock.lap("write")
        samples = joined(run, windows.tokens, plan.synthetic)
        states = self._walk(samples, dict(zip(kept, smaller_modules, strict=True)), shards)
        if shards:
            shards.finish()
            self._note_zeros()
            if model.checkpoint.pruning.sparsity:
                record.sparsity = sparsity(StreamedModel(Checkpoint(output), "cpu"))
                write_config(output, values, record)
        directory = run.world.received(directory)  # when all is written
        smaller = StreamedModel(Checkpoint(directory), str(model.device), record.dtype)
        check_outputs(smaller, states)
        run.clock.lap("check")
        if heldout:
            record.perplexity["after"] = run.perplexity(smaller, heldout, shared=True)
        before, others = self.tensors.parameters(model, []), numbers(model.checkpoint, outside)
        after = numbers(smaller.checkpoint, smaller.checkpoint.entries)
        removed = 1 - (after - others) / (before - others)
        parameters = {"before": before, "after": after}
        heads, neurons, experts = (self.removed[kind] for kind in ("heads", "neurons", "experts"))
        record.structure = StructureRecord(
            parameters, removed, plan.influence, plan.dropped, heads, neurons, experts, combinations=plan.tried
        )

    def _note_zeros(self) -> None:
        """Says, of a model that was pruned, that fits make other numbers of its zeros."""
        weights, zeros, revived = (self.counts[name] for name in ("weights", "zeros", "revived"))
        if revived and zeros >= FEW_ZEROS * weights:
            said = (
                f"{revived:,} of the {zeros:,} zeros of the model in what is left of the matrices that were fitted are "
                "not zero any more: fits take no account of zeros; shrink before you prune"
            )
            self.run.note(self.record, said)

    def _walk(self, samples: Tensor, smaller: dict[int, nn.Module], shards: Shards | None) -> HiddenStates:
        """Removes and writes; the outputs after the last block, with zeros for neurons and heads that were removed.

        ``smaller`` are the blocks to be, by the numbers that they had. What follows a block and is not among them has
        to be known to the dense model first, so that block comes again behind them.
        """
        run, kept, depth = self.run, list(smaller), len(self.model.blocks)
        has_gaps = len(kept) < depth
        states, dense = self._embedded(samples, has_gaps)
        following = dict(zip(kept, [*kept[1:], depth], strict=True))
        order = [*range(kept[0])]
        for index, after in following.items():
            order += [*range(index, after), *([index] if after > index + 1 else [])]
        seen = -1  # the last block that the dense model has run
        for block in self.model.stream(order if dense else kept):
            if dense and block.index > seen:  # the block is still as it was
                run.progress.stage(block.index, "advance", len(dense.hidden))
                block.advance(dense, run.progress.step)
                seen = block.index
                run.clock.lap("advance")
            if block.index not in kept or (dense and seen + 1 < following[block.index]):
                continue
            number = kept.index(block.index)
            start = max(start for start in self.model.starts if start <= block.index)
            tensors = BlockTensors(self.model, block.index, self.tensors.blocks[block.index])
            is_bridge = following[block.index] > block.index + 1
            block = self._changed(block, smaller[block.index], states, dense, tensors, is_bridge)
            if shards:
                tensors.write(sum(start <= each < block.index for each in kept), _shard(1 + number, kept), shards)
                self.counts += tensors.counts
            run.clock.lap("write")
            run.progress.stage(block.index, "advance", len(states.hidden))
            block.advance(states, run.progress.step)
            run.clock.lap("advance")
            free(smaller[block.index])
        return states

    def _embedded(self, tokens: Tensor, has_gaps: bool) -> tuple[HiddenStates, HiddenStates | None]:
        """The inputs of the first block, and where anything is fitted to the dense model those of that."""
        embed, epochs = self.model.embed, self.effort.fit.epochs
        if not epochs:
            return embed(tokens), embed(tokens) if has_gaps else None
        part = self.effort.fit.tokens_per_part(self.run.world.size)
        order, count = samples_to_fit(len(tokens), epochs)
        tokens = tokens[order]
        return embed(tokens, part), embed(tokens if has_gaps else tokens[:count], part)

    def _changed(
        self,
        block: DecoderBlock,
        smaller: nn.Module,
        states: HiddenStates,
        dense: HiddenStates | None,
        tensors: BlockTensors,
        is_bridge: bool,
    ) -> DecoderBlock:
        """Removes units from ``tensors`` and ``block``, or does again what an earlier run did; the block to go on with.

        That has zeros for heads and neurons that went; of experts it is ``smaller``, in memory instead of it.
        """
        earlier = self._store.earlier(block.index, lambda digest: Changes.load(self._file(block), digest))
        if earlier:
            return self._applied(block, smaller, earlier, tensors)
        self._store.forget(block.index, self.record)
        changes = Changes()
        for removal in self.columns:
            self._remove(block, removal, states, changes)
            self._leave_out(removal, changes, tensors)
        if self.experts and self.experts.paths[block.index]:
            block = self._remove_experts(block, self.experts, smaller, states, tensors, changes)
            self._leave_out(self.experts, changes, tensors)
        if dense and is_bridge:
            self._bridge(block, states, dense, changes)
        if dense and self.effort.fit.epochs and trained_matrices(block):
            self._fit(block, states, dense, changes)
        self._replace(changes, tensors, block.index)
        self._store.save(block.index, self.record, lambda: changes.save(self._file(block)))
        return block

    def _file(self, block: DecoderBlock) -> Path:
        """Where what is done to ``block`` is kept, in the first process."""
        assert self.run.place
        return self.run.place.scratch / f"block-{block.index}.safetensors"

    def _applied(
        self, block: DecoderBlock, smaller: nn.Module, changes: Changes, tensors: BlockTensors
    ) -> DecoderBlock:
        """Does to ``block`` and ``tensors`` what an earlier run did."""
        _put(block, changes.weights)
        for removal in self.removals:
            if removal.kind in changes.kept:
                if isinstance(removal, ExpertRemoval):
                    block = tensors.move(block, smaller, removal, changes.kept[removal.kind])
                self._leave_out(removal, changes, tensors)
        _put(block, changes.moved)
        self._replace(changes, tensors, block.index)
        return block

    def _replace(self, changes: Changes, tensors: BlockTensors, block: int) -> None:
        """Puts the weights that changed into ``tensors``."""
        for matrix in self.model.matrices(block):
            if matrix.name in changes.weights:
                tensors.replace(matrix, changes.weights[matrix.name])
            if matrix.name in changes.moved:
                tensors.replace(matrix, changes.moved[matrix.name], is_smaller=matrix.expert is None)

    def _leave_out(self, removal: Removal, changes: Changes, tensors: BlockTensors) -> None:
        """Leaves the units that go out of ``tensors``, and puts them into the record's lists."""
        kept = changes.kept[removal.kind]
        tensors.keep(removal, kept)
        self.removed[removal.kind].append((~kept).nonzero().squeeze(1).tolist())

    def _remove(self, block: DecoderBlock, removal: Removal, states: HiddenStates, changes: Changes) -> None:
        """Chooses heads or neurons to remove, and puts zeros into ``block`` for them."""
        matrix, run = removal.matrices[block.index], self.run
        run.progress.stage(block.index, "capture", len(states.hidden))
        (inputs,) = block.input_grams(states, run.progress.step, run.world, matrices=[matrix])
        run.clock.lap("capture")
        run.progress.stage(block.index, "solve", 1)
        began = time.perf_counter()
        with named(matrix.label):
            problem = LayerProblem(block.weight(matrix), inputs.gram(shared=False))
            weights = self._importance.get(matrix.place)
            solution = remove_units(problem, removal.size, removal.count, weights)
            stored = block.stored(matrix, solution.W)
        stored, mask = run.world.received((stored, solution.mask[0, :: removal.size].cpu()))
        block.put(matrix, stored)
        changes.weights[matrix.name], changes.kept[removal.kind] = stored, mask
        shape = (matrix.shape[0], matrix.shape[1] - removal.size * removal.count)
        seconds, tokens = time.perf_counter() - began, inputs.tokens
        self._record(
            MatrixRecord(block.index, matrix.name, shape, 0.0, solution.error, seconds, tokens, solution.stats)
        )

    def _bridge(self, block: DecoderBlock, states: HiddenStates, dense: HiddenStates, changes: Changes) -> None:
        """Puts what the blocks behind ``block`` did, which are gone, into its last matrix."""
        run = self.run
        if (matrix := last_matrix(block, states)) is None:
            run.note(
                self.record,
                f"what the blocks removed after block {block.index} did is not put back: that block has no last matrix "
                "whose products are added to its outputs as they are",
            )
            return
        run.progress.stage(block.index, "fit", len(states.hidden))
        began = time.perf_counter()
        with named(matrix.label):
            stored, before, after, tokens = bridge(block, matrix, states, dense.hidden, run.world, run.progress.step)
        changes.weights[matrix.name] = stored
        seconds, stats = time.perf_counter() - began, {"gap_before": before, "gap_after": after}
        earlier = next((each for each in self.record.matrices if (each.block, each.name) == matrix.place), None)
        if earlier:  # it lost columns
            earlier.stats.update(stats)
        else:
            self._record(MatrixRecord(block.index, matrix.name, matrix.shape, 0.0, after, seconds, tokens, {**stats}))

    def _remove_experts(
        self,
        block: DecoderBlock,
        removal: ExpertRemoval,
        smaller: nn.Module,
        states: HiddenStates,
        tensors: BlockTensors,
        changes: Changes,
    ) -> DecoderBlock:
        """Chooses experts to remove; the block to go on with, which is ``smaller``, in memory instead of ``block``."""
        path, run = str(removal.paths[block.index]), self.run
        run.progress.stage(block.index, "capture", len(states.hidden))
        began = time.perf_counter()
        with named(f"block {block.index}, {path}"):
            chosen = choose_experts(block, removal, states, run.progress)
            block = tensors.move(block, smaller, removal, chosen.mask)
            fit = fit_experts(block, path, chosen)
        changes.moved |= {matrix.name: stored for matrix, stored in fit.weights}
        changes.kept[removal.kind] = chosen.mask
        seconds, shape = time.perf_counter() - began, removal.matrices[0].shape
        size = (shape[0], shape[1] * len(fit.weights))
        self._record(MatrixRecord(block.index, path, size, 0.0, fit.error, seconds, fit.tokens, fit.stats))
        return block

    def _fit(self, block: DecoderBlock, states: HiddenStates, dense: HiddenStates, changes: Changes) -> None:
        """Fits what is left of ``block`` to the outputs of the dense one."""
        run = self.run
        fit = Fit(block, states, dense, self.effort.fit, run.world, run.progress.step)
        run.progress.stage(block.index, "fit", fit.batches)
        self.record.fits.append(fit.run())
        fitted = changes.moved if "experts" in changes.kept else changes.weights
        fitted |= {matrix.name: stored for matrix, stored in trained_weights(block)}
        run.clock.lap("fit")

    def _record(self, record: MatrixRecord) -> None:
        self.record.matrices.append(record)
        self.run.progress.solved(record)
        self.run.clock.lap("solve")


def _put(block: DecoderBlock, weights: dict[str, Tensor]) -> None:
    """Puts ``weights``, by the names of matrices, into ``block``."""
    for matrix in block.matrices:
        if matrix.name in weights:
            block.put(matrix, weights[matrix.name])


def _shard(number: int, kept: Sequence[int]) -> str:
    """The file of a block, from 1, or of everything outside blocks, 0."""
    return f"model-{1 + number:05}-of-{1 + len(kept):05}.safetensors"
