"""Runs a list of stages: each writes a model that the next one reads, and the last one's becomes the output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UsageError, named
from niwaki.files import output_errors, replace_file, weights_size
from niwaki.models.device import find_device, peak_memory
from niwaki.records.perplexity import Agreement
from niwaki.records.record import MOST_STAGES, Record, StageRecord
from niwaki.records.wording import counted
from niwaki.runs import card
from niwaki.runs.card import with_result, with_weights, write_recipe
from niwaki.runs.carried import BASE, check_claims
from niwaki.runs.duration import products_per_second
from niwaki.runs.similarity import FEW_SENTENCES
from niwaki.runs.stage import Clock, Run, Stage, Task
from niwaki.runs.workplace import Journal, workplace
from niwaki.texts.texts import Texts


def execute(run: Run, restart: bool = False) -> Record:
    """Does the stages of ``run``, one after the other, and writes the result.

    All of them are opened and checked, and then read their texts, before anything is computed or written. A run that is
    interrupted resumes after the last block that is done, of the stage that was at work. Its recipe goes into the
    output; where the run follows another, the two are compared.

    Returns:
        The record of all stages, which is also in ``niwaki.json`` in the output.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`.
    """
    world, stages = run.world, run.stages
    tasks = _opened(run)
    if world.first and run.recipe and run.follows:
        run.recipe = with_weights(run.recipe, run.source)
        for difference in run.follows.differences(run.recipe):
            run.progress.note(f"not as in the recipe: {difference}")
    asked = [{"stage": stage.name, **task.asked()} for stage, task in zip(stages, tasks, strict=True)]
    for each in asked[1:]:
        each.pop("model", None)
    world.check_same(asked[0] if len(asked) == 1 else {f"stage {i + 1}": each for i, each in enumerate(asked)})
    run.clock.lap("prepare")
    with workplace(run.out, asked, restart) if world.first else contextlib.nullcontext() as place:
        run.place, journal = place, world.received(place.journal if place else Journal(asked))
        record = Record.from_json(journal.result) if journal.result else None
        done = journal.done
        if done < len(asked):
            run.journal = journal
            _say_first(run, tasks, done)
        for number in range(done, len(asked)):
            if number > done:
                run.clock, journal = Clock(), Journal(asked, done=number)
            # In the first process that which is written.
            run.number, run.earlier, run.journal = number, record, place.journal if place else journal
            if number:
                run.reading = world.received(place.source if place else None) or run.source
            if len(asked) > 1:
                words = filter(None, [run.stage.name, str(run.stage)])
                run.progress.turn(number + 1, len(asked), ", ".join(words))
            record = _done(run, _reread(run, tasks))
        assert record
        if place:
            place.move()
    run.progress.end(record)
    return record


def check(run: Run) -> list[Texts]:
    """Raises what :func:`execute` would before anything is computed; the texts of the stages that have some."""
    run.only_checks = True
    return [task.texts for task in _opened(run) if task.texts]


def _say_first(run: Run, tasks: Sequence[Task], done: int) -> None:
    """What is to be known before the work, ``done`` stages of which are there: now other texts can still be given."""
    for note in dict.fromkeys(note for task in tasks if task.texts for note in task.texts.notes):
        run.progress.note(note)
    _say_duration(run, tasks[done:])
    if done:
        run.progress.note(f"resuming after {done} of {len(tasks)} stages, where an earlier run stopped")


def check_order(stages: Sequence[Stage], labels: Sequence[str]) -> None:
    """UsageError for no stages or too many, or where one cannot follow those before it, which it names by its label."""
    if not stages:
        raise UsageError("a run needs at least one stage, such as Prune(0.5)")
    if len(stages) > MOST_STAGES:
        raise UsageError(f"a run has at most {MOST_STAGES} stages; got {len(stages):,}")
    for number, (stage, label) in enumerate(zip(stages, labels, strict=True)):
        with named(label):
            if number and stages[number - 1].is_format:
                raise UsageError(f"nothing comes after {stages[number - 1].name}, which is for files that are finished")
            if not stage.is_format and any(each.only_formats_follow for each in stages[:number]):
                raise UsageError(
                    f"only formats follow embeddings, which are put on a grid last; {stage.name} comes after"
                )
            if not stage.keeps_factors and any(each.makes_factors for each in stages[:number]):
                raise UsageError(
                    f"{stage.name} would make dense matrices of two sparse factors: only healing and formats follow"
                )
            stage.check_order(tuple(stages[:number]))


def _opened(run: Run) -> list[Task]:
    """All stages, opened, and then with their texts; what is measured on is the same for all.

    That is the text after all windows that any of them trains on.
    """
    tasks = list[Task]()
    for number, label in enumerate(run.labels):
        run.number = number
        with named(label):
            tasks.append(run.stage.open(run))
    for number, label in enumerate(run.labels):
        run.number = number
        with named(label):
            tasks[number].read(run)
    texts = [task.texts for task in tasks if task.texts]
    if len(texts) > 1:
        most = max(texts, key=lambda each: len(each.samples))
        for task in tasks:
            if task.texts:
                task.measure_on(most.heldout)
    run.number = 0
    return tasks


def _say_duration(run: Run, tasks: Sequence[Task]) -> None:
    """Says about how long ``tasks`` take, of which blocks of the first one may be done, where that is known."""
    if not run.world.first:
        return
    speed = run.world.size * products_per_second(find_device(run.compute.device))
    known = [seconds for task in tasks if (seconds := task.expected(speed)) is not None]
    if len(known) == len(tasks):
        done, blocks = tasks[0].extent(run)
        known[0] *= 1 - done / max(1, blocks)
        run.progress.estimate(sum(known))


def _reread(run: Run, tasks: Sequence[Task]) -> Task:
    """The task that it is the turn of; opened again where stages before it have left other tokens of the same text."""
    task = tasks[run.number]
    changed = [heldout for one in tasks[: run.number] if (heldout := one.heldout_after()) is not None]
    if not changed or not task.texts:
        return task
    again = run.stage.open(run)
    again.read(run)
    again.measure_on(changed[-1])
    return again


def _done(run: Run, task: Task) -> Record:
    """Does the stage that it is the turn of; the record of all stages so far."""
    with _report_interruption(run, task):
        record = task.work(run)
        if task.carried:
            run.note(record, *task.carried.notes)
        for peaks in run.world.collected(peak_memory(find_device(run.compute.device))):
            most = {where: max(peak, record.peak_memory.get(where, 0)) for where, peak in peaks.items()}
            record.peak_memory = {**record.peak_memory, **most}
        if run.place:
            _compare(run, record)
            _finish(run, record)
    return run.world.received(record)


def _compare(run: Run, record: Record) -> None:
    """Measures sentence vectors, or scores, where the model predicts no words."""
    sentences = run.sentences
    if not sentences.windows or not run.place or run.stage.is_format:
        return
    run.progress.status("comparing with the dense model")
    paths = {"pruned": run.source} if run.is_first and sentences.dense != run.source else {}
    for when, path in {**paths, "after": run.place.directory}.items():
        found = sentences.measured(path, run.compute.device, run.compute.dtype)
        if isinstance(found, Agreement):
            record.scores[when] = found
        else:
            record.vectors[when] = found
    if found.sentences < FEW_SENTENCES:
        few = counted(found.sentences, "sentence")
        run.note(record, f"only {few} were compared with the dense model's; more --text-samples tell more")
    run.clock.lap("comparison")


def _finish(run: Run, record: Record) -> None:
    """Completes the record, writes the last one and its card, and says in the journal that the stage is done."""
    place, earlier, stage = run.place, run.earlier, run.stage
    assert place
    if len(run.stages) > 1:
        others = earlier.stages if earlier else []
        # A format is not measured: the perplexity in the record is that of the stage before.
        measured = None if stage.is_format else record.perplexity.get("after")
        record.stages = [
            *others,
            StageRecord(stage.name, str(stage), run.clock.total(), measured),
        ]
    if not stage.is_format:
        check_claims(Checkpoint(place.directory))
        own, base = place.directory / "niwaki.json", place.directory / BASE
        with output_errors(place.directory):
            if stage.keeps_matrices and not earlier and own.exists() and not base.exists():
                own.replace(base)
    if earlier:
        run.clock.add(earlier.seconds)
    record.seconds = {**run.clock.seconds, "total": run.clock.total()}
    record.size = {"before": Checkpoint(run.source).size_in_files, "after": weights_size(place.directory)}
    if {"before", "after"} <= record.perplexity.keys():
        record.loss = record.perplexity["after"].lost_from(record.perplexity["before"]).nats
    if stage.is_format and (there := place.directory / "niwaki.json").exists():  # written by the stage before
        written = Record.load(there)
        written.size = record.size
        written.save(there)
    is_format, *after = (each.is_format for each in run.stages[run.number :])
    made = None
    if run.recipe and not after:  # reading all weights takes its time, and nobody waits for it here
        made = with_result(with_weights(run.recipe, run.source), record, place.directory)
    if made and run.follows and (outcome := run.follows.outcome(made)):
        run.note(record, outcome)
    if not is_format and all(after):
        card.write(place.directory, record, has_recipe=run.recipe is not None)
        replace_file(place.directory / "niwaki.json", record.to_json())
    if made:
        write_recipe(made, place.directory)
    place.finish_stage(record)


@contextlib.contextmanager
def _report_interruption(run: Run, task: Task) -> Iterator[None]:
    """Says what stays of a run that ends early, if anything does."""
    try:
        yield
    except BaseException as error:
        place, count = run.place, len(run.stages)
        where = f"stage {run.number + 1} of {count}, {run.stage.name}" if count > 1 else ""
        if place and place.has_more_to_come:
            run.progress.stopped(*task.extent(run), where)
        elif isinstance(error, KeyboardInterrupt) and place and not place.journal.complete:
            run.progress.lost()
        raise
