"""Tasks, by the real harness, against likelihoods that transformers gives in float64."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
import torch
from transformers import AutoTokenizer

import niwaki
from niwaki.errors import CheckpointError, NumericalError, TaskError, UnknownNameError, UsageError
from niwaki.evaluation.tasks import Score, TaskScores, evaluate_tasks, read_questions
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute
from support.command import Command
from support.models import EMBEDDED, add_tokenizer, message, reference, save_model, save_model_with_tokenizer, weight
from support.scripts import run_script

Question = dict[str, Any]
QUESTIONS = Path(str(files("niwaki"))) / "data" / "which-follows.jsonl"
ENDINGS, SUN = ["sits down.", "flies.", "is a cup.", "not."], ["bright", "a tree"]
#: The seven of the Wanda paper, with a question of the form that each data set has.
SEVEN: dict[str, Question] = {
    "boolq": {"passage": "Snow is white.", "question": "is snow white", "label": 1},
    "rte": {"sentence1": "He ran home.", "sentence2": "He ran.", "label": 0},
    "hellaswag": {
        "activity_label": "Walking",
        "ctx_a": "A man walks.",
        "ctx_b": "he",
        "endings": ENDINGS,
        "label": "0",
    },
    "winogrande": {"sentence": "Ann thanked Mary; _ had helped.", "option1": "Ann", "option2": "Mary", "answer": "2"},
    "arc_easy": {
        "question": "What is wet?",
        "choices": {"text": ["sand", "sea"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "arc_challenge": {"question": "Hot?", "choices": {"text": ["fire", "ice"], "label": ["1", "2"]}, "answerKey": "1"},
    "openbookqa": {"question_stem": "The sun is", "choices": {"text": SUN, "label": ["A", "B"]}, "answerKey": "A"},
}
#: Where the harness has those that are not in a folder of their name.
PLACES = {"boolq": "super_glue/boolq", "rte": "glue/rte", "arc_easy": "arc", "arc_challenge": "arc"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_with_tokenizer(tmp_path / "model")


def shipped(count: int) -> list[Question]:
    return [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:count]]


def write(path: Path, questions: list[Question]) -> str:
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return str(path)


@functools.cache
def reference_of(path: Path) -> tuple[Any, Any]:
    return reference(path, torch.float64), AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def likelihoods(path: Path, context: str, choices: list[str]) -> list[float]:
    """Of each choice behind the context and a blank, one at a time."""
    whole, tokenizer = reference_of(path)
    found = []
    for choice in choices:
        ids = tokenizer(f"{context} {choice}")["input_ids"]
        given = len(tokenizer(context)["input_ids"])
        logits = whole(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(sum(logits[at - 1, ids[at]].item() for at in range(given, len(ids))))
    return found


def best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def by_metric(found: TaskScores, task: str) -> dict[str, Score]:
    return {score.metric: score for score in found.scores if score.task == task}


@pytest.mark.slow
def test_a_packed_model(tmp_path: Path) -> None:
    """On a CPU it runs in float32, as the dense one does, whatever it is stored in."""
    model = save_model_with_tokenizer(tmp_path / "model")
    reference(model, torch.bfloat16).save_pretrained(model)
    few: dict[str, Any] = {"calibration": Calibration("demo", samples=2, length=32), "measurement": None}
    niwaki.prune(model, tmp_path / "pruned", 0.7, solver="magnitude", effort="fast", compute="cpu", **few)
    niwaki.pack(tmp_path / "pruned", tmp_path / "packed")
    file = Path(write(tmp_path / "some.jsonl", shipped(6)))
    found = [niwaki.evaluate_tasks(tmp_path / name, file, compute="cpu") for name in ("pruned", "packed")]
    assert found[0] == found[1]
    assert found[0].dtype == "float32"


@pytest.mark.slow
def test_choices_are_those_of_transformers(tmp_path: Path) -> None:
    """With the reference's own answers as the right ones all is right, and with others nothing."""
    questions = shipped(12)
    plain, normal, none = [], [], []
    for question in questions:
        values = likelihoods(EMBEDDED, question["context"], question["choices"])
        each = [v / len(choice) for v, choice in zip(values, question["choices"], strict=True)]
        plain.append({**question, "answer": best(values)})
        normal.append({**question, "answer": best(each)})
        none.append({**question, "answer": (best(values) + 1) % 4})
    # Some of the right answers differ, or this would not tell the two metrics apart.
    assert plain != normal
    assert plain != questions
    names = [write(tmp_path / f"{name}.jsonl", q) for name, q in (("p", plain), ("n", normal), ("0", none))]
    found = evaluate_tasks("demo", [*names, write(tmp_path / "q.jsonl", questions)])
    assert by_metric(found, names[0])["acc"].value == 1.0
    assert by_metric(found, names[1])["acc_norm"].value == 1.0
    assert by_metric(found, names[1])["acc"].value < 1.0
    assert by_metric(found, names[2])["acc"].value == 0.0
    right = sum(ours["answer"] == theirs["answer"] for ours, theirs in zip(plain, questions, strict=True)) / 12
    score = by_metric(found, str(tmp_path / "q.jsonl"))["acc"]
    assert 0 < right < 1
    assert score.value == pytest.approx(right)
    assert score.standard_error == pytest.approx(math.sqrt(right * (1 - right) / 11))
    assert (score.questions, score.shots) == (12, 0)
    assert (found.harness, found.device, found.dtype) == (lm_eval.__version__, "cpu", "float32")
    limited = evaluate_tasks("demo", [names[0], names[2]], limit=1)
    assert [(s.questions, s.standard_error) for s in limited.scores] == [(1, None)] * 4
    assert limited.mean == (0.5, None)


@pytest.mark.slow
def test_questions_are_asked_as_such(model: Path, tmp_path: Path) -> None:
    """A file with questions, as a list, is the same as one with what is asked as contexts."""
    choices = ["the sea", "a cup of tea", "{{ braces }}"]
    text = "What is wet \u2028 and {{ question }}?"
    asked = f"Question: {text}\nAnswer:"
    answer = best(likelihoods(model, asked, choices))
    question = tmp_path / "question.json"
    question.write_text(json.dumps([{"question": text, "choices": choices, "answer": answer}] * 2))
    asking = json.dumps({"context": asked, "choices": choices, "answer": answer}, ensure_ascii=False)
    (context := tmp_path / "context.jsonl").write_text(f"{asking}\n\n")
    assert read_questions(question) == read_questions(context) * 2
    found = evaluate_tasks(str(model), [str(question), str(context)])
    assert [score.value for score in found.scores if score.metric == "acc"] == [1.0, 1.0]


def test_the_mean_and_its_error() -> None:
    def scores(*values: tuple[str, str, float, float | None]) -> TaskScores:
        made = (Score(task, "1", metric, value, error, 100, 0) for task, metric, value, error in values)
        return TaskScores(tuple(made), "0", None, "cpu", "float32")

    two = (("a", "acc", 0.5, 0.03), ("a", "acc_norm", 0.9, 0.03), ("b", "acc", 0.6, 0.04))
    assert scores(*two).mean == pytest.approx((0.55, 0.025))
    assert scores(*two[:2]).mean is None
    assert scores(*two, ("c", "exact_match", 0.5, 0.1)).mean is None
    assert scores(two[0], ("b", "acc", 0.5, None)).mean == (0.5, None)


@pytest.mark.slow
def test_tasks_of_the_harness(model: Path, monkeypatch: pytest.MonkeyPatch, niwaki_: Command) -> None:
    """The harness's own definitions of the paper's seven, with questions that need no network."""
    places = [Path(lm_eval.tasks.__file__).parent / PLACES.get(name, name) for name in SEVEN]
    few = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False, include_path=places)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    named = {"ARC-Easy": "arc_easy", "ARC-Challenge": "arc_challenge"}
    sets = {"aps/super_glue": "boolq", "nyu-mll/glue": "rte", "Rowan/hellaswag": "hellaswag"}
    sets |= {"allenai/winogrande": "winogrande", "allenai/openbookqa": "openbookqa"}

    def local(path: str, name: str | None = None, **_: Any) -> datasets.DatasetDict:
        rows = datasets.Dataset.from_list([SEVEN[sets.get(path) or named[str(name)]]] * 3)
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

    monkeypatch.setattr(datasets, "load_dataset", local)
    found = evaluate_tasks(str(model), [*SEVEN, "which-follows", "rte"], limit=2)
    assert list(dict.fromkeys(score.task for score in found.scores)) == [*SEVEN, "which-follows"]
    first = {task: by_metric(found, task)["acc"] for task in SEVEN}
    assert first["boolq"].version == "2.0"
    assert {score.version for task, score in first.items() if task != "boolq"} == {"1.0"}
    normalized = {score.task for score in found.scores if score.metric == "acc_norm"}
    assert normalized == {"hellaswag", "arc_easy", "arc_challenge", "openbookqa", "which-follows"}
    prompts = {
        "boolq": ("Snow is white.\nQuestion: is snow white?\nAnswer:", ["no", "yes"], 1),
        "rte": ("He ran home.\nQuestion: He ran. True or False?\nAnswer:", ["True", "False"], 0),
        "openbookqa": ("The sun is", SUN, 0),
    }
    for task, (prompt, choices, answer) in prompts.items():
        assert first[task].value == (best(likelihoods(model, prompt, choices)) == answer)
    whole = [*first.values(), by_metric(found, "which-follows")["acc"]]
    assert found.mean is not None
    assert found.mean[0] == pytest.approx(sum(score.value for score in whole) / 8)

    def unreachable(**_: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    said = message(lambda: evaluate_tasks(str(model), ["boolq"]), TaskError)
    assert "the questions of boolq are not available (no route)" in said
    assert "give a file of questions" in said
    said = message(lambda: evaluate_tasks(str(model), ["xyzzy!"]), UnknownNameError)
    assert said == "no task is called 'xyzzy!'; the command `lm-eval ls tasks` lists all"
    monkeypatch.setattr(StreamedModel, "embed", None)  # nothing is computed before that is seen
    ran = niwaki_("eval", model, "--text", "demo", "--tasks", "which-folows")
    assert (ran.code, ran.out) == (2, "")
    assert "no task is called 'which-folows'; did you mean which-follows?" in ran.err


def test_the_questions_that_ship() -> None:
    questions = read_questions(QUESTIONS)
    assert len(questions) == 300
    assert QUESTIONS.stat().st_size < 200_000
    counts = Counter(choice for question in questions for choice in question["choices"])
    right = Counter(question["choices"][question["answer"]] for question in questions)
    # Each is right once and wrong three times, so that the choices alone say nothing.
    assert set(right.values()) == {1}
    assert set(counts.values()) == {4}
    assert Counter(question["answer"] for question in questions) == dict.fromkeys(range(4), 75)
    assert {len(choice.split()) for choice in counts} == {8}
    assert not run_script(Path(__file__).parents[2] / "scripts" / "which_follows.py", "--check")


@pytest.mark.slow
def test_the_embedded_model_is_better_than_chance() -> None:
    found = by_metric(evaluate_tasks("demo", ["which-follows"], limit=100), "which-follows")["acc"]
    assert found.standard_error == pytest.approx(math.sqrt(found.value * (1 - found.value) / 99))
    assert found.value > 0.25 + 5 * math.sqrt(0.25 * 0.75 / 100)


QUESTION = '{"context": "x", "choices": ["y", "z"], "answer": 0}'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", QUESTION + "\n{", "a.jsonl, line 2: not a JSON object: no JSON"),
        ("a.json", "{", "a.json, line 1: not a JSON object: no JSON"),
        ("a.json", "[]", "a.json has no questions"),
        ("a.jsonl", "\n", "a.jsonl has no questions"),
        ("a.jsonl", b"\xff", "a.jsonl cannot be read"),
        ("a.jsonl", None, "there is no file"),
        ("a\0.jsonl", None, "there is no file"),
        ("a.json", "9" * 5000, "a.json, line 1: not a JSON object: a number has too many digits"),
        ("a.json", "[" * 100_000, "entry 1: not an entry of a JSON list: lists or objects are nested too deeply"),
        ("a.jsonl", QUESTION.replace("z", "\\ud800"), "a.jsonl, line 1: not a JSON object: half of a surrogate pair"),
        ("a.json", '["x"]', "a.json, entry 1: wants a text as either 'context' or 'question'"),
        ("a.jsonl", '{"context": "x", "question": "y"}', "wants a text as either 'context' or 'question'"),
        ("a.jsonl", '{"context": "x", "choices": ["y"], "answer": 0}', "2 or more texts; got ['y']"),
        ("a.jsonl", '{"context": "x", "choices": "yz", "answer": 0}', "2 or more texts; got 'yz'"),
        ("a.jsonl", '{"context": "x", "choices": ["y", ""], "answer": 0}', "2 or more texts; got"),
        ("a.jsonl", '{"context": "x", "choices": ["y", " "], "answer": 0}', "line 1: 'choices' must be 2 or more"),
        ("a.jsonl", '{"context": "x", "choices": ["y", "z"], "answer": 2}', "0 to 1; got 2"),
        ("a.jsonl", '{"context": "x", "choices": ["y", "z"], "answer": true}', "0 to 1; got True"),
        ("a.jsonl", '{"context": "x", "choices": ["y", "z"]}', "0 to 1; got None"),
    ],
)
def test_files_that_are_none(model: Path, tmp_path: Path, name: str, content: str | bytes | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in message(lambda: evaluate_tasks(str(model), [str(path)]), TaskError)


def test_a_file_in_several_ways(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two paths, alone and not in a list, and as an editor on Windows writes it."""
    monkeypatch.chdir(tmp_path)
    text = Path(write(tmp_path / "a.jsonl", shipped(3))).read_bytes()
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    found = evaluate_tasks(model, ["a.jsonl", "./a.jsonl", str(tmp_path / "a.jsonl")])
    assert {score.task for score in found.scores} == {"a.jsonl"}
    assert evaluate_tasks(model, "a.jsonl") == found
    assert read_questions(tmp_path / "marked.jsonl") == read_questions(tmp_path / "a.jsonl")


@pytest.mark.slow
def test_what_goes_wrong(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask: Callable[..., TaskScores] = functools.partial(evaluate_tasks, tasks=["which-follows"])
    assert "limit must be 1 or more; got 0" in message(lambda: ask(model, limit=0))
    assert "which tasks?" in message(lambda: evaluate_tasks(model, []))
    assert "got [5]" in message(lambda: evaluate_tasks(model, [5]))  # type: ignore[list-item]
    nobody = "~nobody-of-that-name/x.jsonl"
    assert "there is no file ~nobody" in message(lambda: evaluate_tasks(model, [nobody]), TaskError)
    assert "no directory" in message(lambda: ask("./nowhere"), UsageError)
    os.mkfifo(pipe := tmp_path / "pipe.jsonl")  # would be read for ever
    assert "there is no file" in message(lambda: evaluate_tasks(model, [pipe]), TaskError)
    blank = write(model / "blank.jsonl", [{"context": " ", "choices": ["a", "b"], "answer": 0}])
    assert "a context or a choice has no tokens" in message(lambda: evaluate_tasks(model, blank), TaskError)
    other = add_tokenizer(save_model(model.parent / "other"))
    assert "is it the model's own tokenizer?" in message(lambda: ask(other, limit=1))
    assert "device 'quantum'" in message(lambda: ask(model, compute="quantum"))
    assert "got float8" in message(lambda: ask(model, compute=Compute(dtype="float8")))
    whole = reference(model)
    weight(whole, "model.layers.1.mlp.up_proj").fill_(float("nan"))
    whole.save_pretrained(model)
    assert "likelihoods in which-follows are NaN" in message(lambda: ask(model, limit=2), NumericalError)
    (model / "config.json").unlink()
    assert "no config.json" in message(lambda: ask(model), CheckpointError)
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    assert "pip install datasets 'lm-eval<0.5'" in message(lambda: ask(model), TaskError)


@pytest.mark.slow
def test_eval_with_tasks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, niwaki_: Command) -> None:
    monkeypatch.chdir(tmp_path)
    local = write(tmp_path / "mine.jsonl", shipped(9))
    ran = niwaki_("eval", model, "--tasks", f"which-follows, {local}", "--limit", 8, "--record", "all.json")
    assert (ran.code, ran.err) == (0, "")
    values = json.loads((tmp_path / "all.json").read_text())
    assert "perplexity" not in values
    found = values["tasks"]
    assert [score["task"] for score in found["scores"]] == ["which-follows"] * 2 + [local] * 2
    first, _, second, _ = found["scores"]
    assert first["value"] == second["value"]  # the same questions
    assert first["version"] != second["version"]
    assert found["mean"]["value"] == first["value"]
    assert found["mean"]["standard_error"] == pytest.approx(first["standard_error"] / math.sqrt(2))
    assert found["harness"] == lm_eval.__version__
    assert values["command"].startswith(f"niwaki eval {model} --tasks 'which-follows, ")
    assert values["versions"]["torch"]
    assert values["seconds"] > 0
    lines = ran.out.splitlines()
    assert lines[0].split() == ["task", "version", "few-shot", "questions", "metric", "score"]
    shown = [f"{100 * first['value']:.2f}", "±", f"{100 * first['standard_error']:.2f}"]
    assert lines[1].split() == ["which-follows", first["version"], "0", "8", "acc", *shown]
    assert lines[5].split()[:3] == ["mean", "acc", shown[0]]
    assert lines[6].startswith("% of the first 8 questions of each task; lm-evaluation-harness ")
    assert len(lines) == 7

    both = ("--tasks", "which-follows", "--limit", 1, "--text", "demo", "--length", 32, "--samples", 2)
    ran = niwaki_("eval", model, *both, "--record", "both.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("perplexity ")
    assert {"tasks", "perplexity"} <= set(json.loads((tmp_path / "both.json").read_text()))

    for wrong, said in (
        (("--text", "demo", "--limit", 3), "--limit is for --tasks"),
        (("--tasks", "which-follows", "--samples", 3), "--length, --samples, --field and --no-bos are for --text"),
        (("--tasks", ","), "which tasks?"),
    ):
        ran = niwaki_("eval", model, *wrong)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert said in ran.err
