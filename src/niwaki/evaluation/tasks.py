"""Tasks through lm-evaluation-harness, with its questions, prompts and scores.

A task is a name that the harness knows, such as ``boolq`` or ``mmlu``; a file of questions with choices (``.jsonl``,
or ``.json`` with a list), whose lines are::

    {"context": "The old man looked at", "choices": ["the sea.", "of the."], "answer": 0}
    {"question": "What colour is snow?", "choices": ["black", "white"], "answer": 1}

where a context is continued as it is and a question is asked as ``Question: ...`` and ``Answer:`` in a line each; or
``which-follows``, questions of that kind that ship with niwaki. A blank goes before each choice, and ``answer`` counts
from 0.
"""

import contextlib
import hashlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from niwaki.arguments import checked
from niwaki.errors import (
    CalibrationError,
    CheckpointError,
    NiwakiError,
    NumericalError,
    TaskError,
    UnknownNameError,
    UsageError,
    first_line,
)
from niwaki.models.device import find_device, find_dtype
from niwaki.models.locate import check_predicts, locate_model
from niwaki.models.structure import auto_class, read_config
from niwaki.models.tokens import check_tokens, load_tokenizer
from niwaki.options import Compute, check_count
from niwaki.packed.format import PackedCheckpoint, open_checkpoint
from niwaki.packed.load import load
from niwaki.records.progress import Progress
from niwaki.texts.files import rows

#: The questions that ship with niwaki.
SHIPPED = {"which-follows": Path(str(files("niwaki"))) / "data" / "which-follows.jsonl"}
#: Questions in one forward pass on a CPU. On a GPU the harness finds out how many fit.
BATCH = 16
#: The harness's own, for tasks that draw their examples.
SEED = 1234
_ACCURACY = "acc"


@dataclass(frozen=True)
class Score:
    """The score of one task by one metric.

    Attributes:
        task: Name of the task, or its file as it was given.
        version: The harness's version of the task; for files, and for tasks that ship with niwaki, the start of the
            SHA-256.
        metric: Name of the metric in the harness: "acc" is the fraction of questions whose right choice is the most
            likely one, "acc_norm" the fraction where it is the most likely per character.
        value: The score; accuracies are from 0 to 1.
        standard_error: The harness's, if it has one; for accuracies, the standard deviation of right and wrong answers
            over the square root of their number.
        questions: Number of questions asked, each after ``shots`` examples.
    """

    task: str
    version: str
    metric: str
    value: float
    standard_error: float | None
    questions: int
    shots: int


@dataclass(frozen=True)
class TaskScores:
    """The scores of a model: one for each task and metric, in the order of the tasks.

    ``harness`` is the version of lm-evaluation-harness. The first ``limit`` questions of each task were asked, or all.
    """

    scores: tuple[Score, ...]
    harness: str
    limit: int | None
    device: str
    dtype: str

    @property
    def mean(self) -> tuple[float, float | None] | None:
        """The mean of the tasks' "acc", as papers report it, with its standard error for independent tasks.

        None if there are fewer than two tasks, or one has no accuracy.
        """
        scores = [score for score in self.scores if score.metric == _ACCURACY]
        if len(scores) < 2 or len(scores) != len({score.task for score in self.scores}):
            return None
        squares = [score.standard_error**2 for score in scores if score.standard_error is not None]
        error = math.sqrt(sum(squares)) / len(scores) if len(squares) == len(scores) else None
        return sum(score.value for score in scores) / len(scores), error


@checked
def evaluate_tasks(
    model: str | Path,
    tasks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    limit: int | None = None,
    compute: Compute | str = Compute(),
    progress: Progress | None = None,
) -> TaskScores:
    """Scores a model, dense, pruned or packed, on one or several tasks of lm-evaluation-harness.

    The whole model has to fit in memory.

    Args:
        model: A directory or hub id.
        tasks: One or several: names that the harness knows, files of questions (``.jsonl`` or ``.json``), or
            "which-follows", questions that ship with niwaki. :mod:`niwaki.evaluation.tasks` describes the files.
        limit: Ask only the first N questions of each task; None for all.
        compute: The device and the dtype; ``tf32`` and ``max_memory`` are not used.
        progress: Receives the progress of the measurement; with it, the harness shows bars of its own on a terminal.

    Returns:
        A score for each task and metric, in the order of the tasks.

    Raises:
        UnknownNameError: there is no task of that name.
        TaskError: the harness is not installed, or the questions are not available.
        NiwakiError: see :mod:`niwaki.errors`.
    """
    check_count("limit", limit, 1)
    compute = Compute.of(compute)
    compute.only("evaluate_tasks", "device", "dtype")
    names = find_tasks(tasks)
    import lm_eval
    from lm_eval.evaluator import evaluate

    if progress:
        progress.status("asking questions")
    with _quiet(progress is not None and sys.stderr.isatty()):
        built = _build(names)
        lm = _load(str(model), compute.device, compute.dtype)
        try:
            results = evaluate(lm, {"tasks": built}, limit=limit, log_samples=False)
        except NiwakiError:
            raise
        except Exception as error:  # of any library, in any of thousands of tasks
            empty = isinstance(error, AssertionError) and not str(error)
            what = "a context or a choice has no tokens, or too many for the model" if empty else first_line(error)
            raise TaskError(f"the tasks {', '.join(built)} cannot be run: {what}") from error
    for name, task in built.items():
        likelihoods = [answer[0] for asked in task.instances for answer in asked.resps if answer]
        if any(isinstance(value, float) and math.isnan(value) for value in likelihoods):
            raise NumericalError(f"likelihoods in {name} are NaN; try dtype float32")
    scores = tuple(score for name in built for score in _scores(name, results))
    dtype = str(lm.model.dtype).removeprefix("torch.")
    return TaskScores(scores, str(lm_eval.__version__), limit, str(lm.device), dtype)


def find_tasks(tasks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The names of ``tasks``; what :func:`evaluate_tasks` raises where there are none such, before a model is read."""
    names = [os.fspath(task) for task in ([tasks] if isinstance(tasks, str | os.PathLike) else tasks)]
    if not names:
        raise UsageError("which tasks? Give names of lm-evaluation-harness, or files of questions")
    try:
        import lm_eval.evaluator  # noqa: F401
    except ImportError as error:
        raise TaskError(
            f"tasks need lm-evaluation-harness: pip install datasets 'lm-eval<0.5' ({first_line(error)})"
        ) from error
    with _quiet(False):
        _build(names)
    return names


def read_questions(path: Path) -> list[dict[str, Any]]:
    """The questions of a file, as in the module's docstring, each with its whole ``context`` (or TaskError)."""
    path = Path(os.path.expanduser(path))
    if not os.path.isfile(path):  # not even a pipe, which could be read for ever
        raise TaskError(f"there is no file {path}")
    try:
        questions = [_question(row, where) for where, row in rows(path, str(path))]
    except CalibrationError as error:
        raise TaskError(str(error)) from error
    if not questions:
        raise TaskError(f"{path} has no questions")
    return questions


def _question(entry: Any, where: str) -> dict[str, Any]:
    given = entry if isinstance(entry, dict) else {}
    context, question, choices, answer = map(given.get, ("context", "question", "choices", "answer"))
    if isinstance(context, str) == isinstance(question, str):
        raise TaskError(f"{where}: wants a text as either 'context' or 'question'")
    if not (isinstance(choices, list) and len(choices) > 1 and all(isinstance(c, str) and c.strip() for c in choices)):
        raise TaskError(f"{where}: 'choices' must be 2 or more texts; got {choices!r}")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise TaskError(f"{where}: 'answer' must be the number of a choice, 0 to {len(choices) - 1}; got {answer!r}")
    asked = context if isinstance(context, str) else f"Question: {question}\nAnswer:"
    return {"context": asked, "choices": choices, "answer": answer}


def _build(tasks: Sequence[str]) -> dict[str, Any]:
    """The harness's task objects by name, each file once; a group is all of its tasks."""
    from lm_eval.tasks import TaskManager

    manager: Any = None
    built: dict[str, Any] = {}
    read = set()
    for name in dict.fromkeys(tasks):
        if name in SHIPPED or Path(name).suffix in {".json", ".jsonl"}:
            questions = _from_file(name, SHIPPED.get(name, Path(name)))
            if (file := name if name in SHIPPED else os.path.realpath(os.path.expanduser(name))) not in read:
                built[name] = questions
                read.add(file)
            continue
        manager = manager or TaskManager()
        if name not in manager.all_tasks:
            known = [*SHIPPED, *manager.all_tasks]
            raise UnknownNameError("task", name, known, "the command `lm-eval ls tasks` lists all")
        try:
            built.update(manager.load([name])["tasks"])
        except Exception as error:  # of the hub, httpx, datasets, the OS, or the task's own code
            what = f"the questions of {name} are not available ({first_line(error)})"
            instead = "without a network, give a file of questions (docs/measuring.md) or which-follows"
            raise TaskError(f"{what}; {instead}") from error
    for task in built.values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(SEED)
    return built


def _from_file(name: str, path: Path) -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    questions, content = read_questions(path), path.expanduser().read_bytes()
    usual = {"aggregation": "mean", "higher_is_better": True}
    version = hashlib.sha256(content).hexdigest()[:8]
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(questions)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "context",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": metric, **usual} for metric in (_ACCURACY, "acc_norm")],
            "metadata": {"version": version},
        }
    )


def _load(model: str, device: str, dtype: str) -> Any:
    """The model, whole, as the harness takes it."""
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):  # type: ignore[misc]
        def tok_encode(self, string: str, *given: Any, **named: Any) -> Any:
            ids = super().tok_encode(string, *given, **named)
            check_tokens(torch.tensor(ids), whole.config)
            return ids

    checkpoint = open_checkpoint(locate_model(model))
    check_predicts(checkpoint, "eval --tasks")
    path, place = checkpoint.path, find_device(device)
    tokenizer, number = load_tokenizer(path), find_dtype(dtype, place, checkpoint)
    whole: Any = load(path, device, number) if isinstance(checkpoint, PackedCheckpoint) else None
    try:
        if whole is None:
            config = read_config(path)
            whole = auto_class(config).from_pretrained(path, config=config, dtype=number, trust_remote_code=False)
            whole = whole.to(place)
        # Without a tokenizer's own limit the harness takes the model's.
        together: Any = BATCH if place.type == "cpu" else "auto"
        return Model(pretrained=whole, tokenizer=tokenizer, batch_size=together, trust_remote_code=False)
    except Exception as error:  # transformers raises nearly anything
        raise CheckpointError(f"transformers cannot load {path}: {first_line(error)}") from error


def _scores(name: str, results: dict[str, Any]) -> Iterator[Score]:
    """The scores of one task, accuracy first."""
    values = results["results"][name]
    metrics = [key for key in values if "," in key and "_stderr," not in key]
    for key in sorted(metrics, key=lambda key: not key.startswith(f"{_ACCURACY},")):
        metric, _, kept = key.partition(",")
        error = values.get(f"{metric}_stderr,{kept}")
        if isinstance(values[key], int | float):
            yield Score(
                name,
                str(results["versions"].get(name)),
                metric if kept == "none" else key,
                float(values[key]),
                float(error) if isinstance(error, int | float) else None,
                int(results["n-samples"][name]["effective"]),
                int(results["n-shot"].get(name) or 0),
            )


@contextlib.contextmanager
def _quiet(bars: bool) -> Iterator[None]:
    """Without what the harness says about itself, and unless they are wanted without all progress bars."""
    from tqdm.std import tqdm

    log, begin = logging.getLogger("lm_eval"), tqdm.__init__
    level = log.level
    log.setLevel(logging.ERROR)
    if not bars:
        tqdm.__init__ = lambda *arguments, **options: begin(*arguments, **{**options, "disable": True})
    try:
        yield
    finally:
        log.setLevel(level)
        tqdm.__init__ = begin
