"""Arguments from Python are what they are annotated to be, or an error of one line names them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import niwaki
from niwaki import Calibration, Effort, Fitting
from niwaki.arguments import check_fields, checked
from niwaki.layer.solvers import Wanda
from support.models import message, random_model
from support.runs import listing

# Without what type checkers know of them.
api: Any = niwaki


@dataclass(frozen=True)
class Fields:
    count: int = 1
    size: float | None = None
    word: Literal["one", "other"] = "one"
    pair: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        check_fields(self)


fields: Any = Fields


def test_numbers_of_numpy_become_those_of_python() -> None:
    made = Fields(np.int64(3), np.float32(0.5), pair=[np.uint8(0), 2])  # type: ignore[arg-type]
    assert repr(made) == "Fields(count=3, size=0.5, word='one', pair=(0, 2))"
    assert Calibration(samples=np.int32(4)) == Calibration(samples=4)  # type: ignore[arg-type]
    assert repr(Fitting(rate=np.float64(0.5))) == repr(Fitting(rate=0.5))


def test_checks_are_those_of_annotations() -> None:
    @checked
    def checked_call(path: str | Path, several: list[str] | None = None, *, flag: bool = False, other=3) -> Any:  # type: ignore[no-untyped-def]
        return path, several, flag, other

    call: Any = checked_call
    assert call("a", ["b"], other="x") == ("a", ["b"], False, "x")
    assert message(lambda: call(3)) == "path must be text or a path; got 3"
    assert message(lambda: call("a", flag=1)) == "flag must be True or False; got 1"
    assert message(call) == "checked_call(): missing a required argument: 'path'; without names it takes path, several"


Call = Callable[[], Any]
#: Fields of another type, calls that make no sense, and arguments that there are not.
WRONG: list[tuple[Call, str]] = [
    (lambda: fields(True), "count must be a whole number; got True"),
    (lambda: fields(1.0), "count must be a whole number; got 1.0"),
    (lambda: fields(size="1"), "size must be a number or None; got '1'"),
    (lambda: fields(size=10**400), f"size must be 0, or of a magnitude from 1e-15 to 1e15; got 1{'0' * 76}..."),
    (lambda: fields(size=-(10**5000)), "size must be 0, or of a magnitude from 1e-15 to 1e15; got a value of type int"),
    (lambda: fields(10**30), "count must be less than 2^63; got 1000000000"),
    (lambda: fields(-(10**30)), "count must be more than -2^63; got -1000000000"),
    (lambda: fields(word="two"), "word must be one or other; got 'two'"),
    (lambda: fields(pair=(0,)), "pair must be (a whole number, a whole number); got (0,)"),
    (lambda: fields(pair="01"), "pair must be (a whole number, a whole number); got '01'"),
    (lambda: api.Fitting(epochs=1e308), "epochs must be 0, or of a magnitude from 1e-15 to 1e15; got 1e+308"),
    (lambda: api.Fitting(epochs=math.inf), "epochs must be 0 or more; got inf"),
    (lambda: api.Fitting(epochs="1"), "epochs must be a number; got '1'"),
    (lambda: api.Fitting(epoch=1), "Fitting() has no argument 'epoch'; did you mean 'epochs'"),
    (lambda: api.ADMM(rho="1"), "rho must be a number; got '1'"),
    (lambda: api.ADMM(rho=True), "rho must be a number; got True"),
    (lambda: api.ADMM(iterations=True), "iterations must be a whole number; got True"),
    (lambda: api.MaskThenUpdate(Wanda(), "exact"), "update must be a Solver; got 'exact'"),
    (lambda: api.make_solver("admm1:rho=1e-320"), "rho must be 0, or of a magnitude from 1e-15 to 1e15; got 1e-320"),
    (lambda: api.make_solver("wanda+" * 100 + "exact"), "101 solvers in sequence are too many"),
    (lambda: api.Grid("4"), "bits must be a whole number; got '4'"),
    (lambda: api.NM(2.0, 4), "n must be a whole number; got 2.0"),
    (lambda: api.PerRow("half"), "sparsity must be a number; got 'half'"),
    (lambda: api.Fixed(torch.ones(2, 2)), "a mask is (out, in) bool; got (2, 2) torch.float32"),
    (lambda: api.Windows([1, 2], "given"), "tokens must be a Tensor; got [1, 2]"),
    (lambda: api.generate("demo", "a", tokens="3"), "tokens must be a whole number; got '3'"),
    (lambda: api.generate("demo", "a", seed=2**64), "seed must be less than 2^63"),
    (lambda: api.evaluate(3), "model must be text or a path; got 3"),
    (lambda: api.evaluate("demo", niwaki.Measurement(samples=0)), "samples must be 1 or more; got 0"),
    (lambda: api.inspect(None), "model must be text or a path; got None"),
    (lambda: api.load("demo", device=0), "device must be text or a device; got 0"),
    (lambda: api.report("demo", prompts="a"), "prompts must be a list of text or None; got 'a'"),
    (lambda: api.Record.load(3), "path must be text or a PathLike; got 3"),
    (lambda: api.prune("model"), "prune(): missing a required argument: 'out'; without names it takes model"),
    (lambda: api.prune("model", "out", 0.5, "wanda"), "prune(): too many positional arguments; without names"),
    (lambda: api.heal("model", "out"), "heal(): missing a required argument: 'teacher'"),
    (lambda: api.Calibration("demo", seqlen=3), "Calibration() has no argument 'seqlen'; did you mean 'length'"),
    (lambda: api.Compute(gpu=1), "Compute() has no argument 'gpu'; it has device, dtype"),
    (lambda: api.Effort(epochs=1), "Effort() has no argument 'epochs'; it has plan, synthetic, fit"),
    (lambda: api.bench("model", prompt=8), "bench() has no argument 'prompt'; did you mean 'prompt_tokens'?"),
    (lambda: api.Prune(sparsity=0.5), "Prune() has no argument 'sparsity'; did you mean 'pattern'"),
    (lambda: api.Prune(wrong=1), "Prune() has no argument 'wrong'; it has pattern, solver, effort, mask_from"),
    (lambda: api.Prune([0.5]), "pattern must be a number, text, a Pattern or None; got [0.5]"),
    (lambda: api.Pack("packed"), "Pack(): too many positional arguments"),
    (lambda: api.Quantize(4), "grid must be text, a Grid or a BlockGrid; got 4"),
    (lambda: api.Shrink(blocks="1"), "blocks must be a whole number; got '1'"),
    (lambda: api.Heal(method="x"), "method must be auto, full, lora, norms, scales or blocks; got 'x'"),
]


@pytest.mark.parametrize(("call", "said"), WRONG)
def test_what_makes_no_sense(call: Call, said: str) -> None:
    assert message(call).startswith(said)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval")
def test_tasks_that_are_not_there() -> None:
    said = message(lambda: niwaki.evaluate_tasks("demo", Path("nowhere.jsonl")), niwaki.NiwakiError)
    assert said.startswith("there is no file nowhere.jsonl")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("prune", {"solver": 3}, "solver must be text, a Solver or None; got 3"),
        ("prune", {"quantize": 4}, "quantize must be text, a Grid, a BlockGrid or None; got 4"),
        ("prune", {"blocks": (0,)}, "blocks must be (a whole number, a whole number), text or None; got (0,)"),
        ("prune", {"blocks": range(2)}, "blocks must be (a whole number, a whole number), text or None; got range("),
        ("prune", {"blocks": "0-2"}, "invalid range '0-2'; give FROM:TO, such as 0:2 for the first two"),
        ("prune", {"pattern": [0.5]}, "pattern must be a number, text, a Pattern or None; got [0.5]"),
        ("prune", {"pattern": "1e9999999%"}, "'1e9999999%' is not a valid pattern"),
        ("prune", {"pattern": "2:4+" * 3000}, "'2:4+"),
        ("prune", {"restart": "yes"}, "restart must be True or False; got 'yes'"),
        ("prune", {"measurement": [1]}, "several texts are given by their names; got [1]"),
        (
            "prune",
            {"pattern": 0.5, "calibration": np.array([[0.5], [1]])},
            "a text is a name, windows or a tensor of tokens; got array([[0.5], [1. ]])",
        ),
        ("shrink", {"blocks": 1.5}, "blocks must be a whole number; got 1.5"),
        ("compare", {"effort": Effort()}, "effort must be text; got Effort("),
        ("compare", {"solvers": [3]}, "solvers must be text, a Solver or a list of text or a Solver; got [3]"),
        ("compare", {"measurement": []}, "a comparison calibrates and measures on texts by their names"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, name: str, options: dict[str, Any], said: str) -> None:
    assert message(lambda: getattr(niwaki, name)("demo", tmp_path / "out", **options)).startswith(said)
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"sparsity": 0.5}, "prune() has no argument 'sparsity'; did you mean 'pattern'?"),
        ({"grid": "int8"}, "prune() has no argument 'grid'; did you mean 'quantize'?"),
        ({"calibraton": "x"}, "prune() has no argument 'calibraton'; did you mean 'calibration'?"),
        ({"pattern": 0.5, "zzz": 1}, "prune() has no argument 'zzz'; it has model, out"),
        ({"seqlen": 64}, "prune() has no argument 'seqlen'; give calibration=Calibration(length=...)"),
        ({"windows": "random"}, "prune() has no argument 'windows'; give calibration=Calibration(order=...)"),
        ({"device": "cuda"}, "prune() has no argument 'device'; give compute=Compute(device=...)"),
        ({"text": "a.txt"}, "prune() has no argument 'text'; did you mean 'measurement'?"),
    ],
)
def test_arguments_that_there_are_not(named: dict[str, Any], said: str) -> None:
    assert said in message(lambda: niwaki.prune("model", "out", **named))


def test_what_the_program_sets_is_not_listed() -> None:
    for call in (lambda: api.Prune(wrong=1), lambda: api.Prune(*range(20)), lambda: api.Heal(tiems=1)):
        assert not {"left_out", "times"} & {*re.findall(r"\w+", message(call))}


PROSE = "Once upon a time, there was a forest.\nIn it lived a king"


@pytest.mark.parametrize(
    "calibration", [PROSE, PROSE.replace("\n", " "), PROSE * 100, [PROSE, "demo"], "Two words and three."]
)
def test_text_in_the_place_of_its_name(calibration: Any) -> None:
    for name in ("calibration", "measurement"):
        said = message(lambda name=name: niwaki.prune("model", "out", 0.5, **{name: calibration}))  # type: ignore[misc]
        assert "is neither a file nor a known data set; to use it as text, write it to a file" in said
        assert len(said) < 250
        assert "\n" not in said


def test_a_file_with_spaces_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once upon a time").write_text("a")
    for name in ("once upon a time", "it is not there.txt", "./nor is this one", "demo", "wikitext 2"):
        assert Calibration(name).text == name


def test_a_model_in_memory() -> None:
    said = message(lambda: niwaki.prune(random_model("llama"), "out", 0.5))  # type: ignore[arg-type]
    assert (
        said == "model must be text or a path; got a LlamaForCausalLM: save it with save_pretrained(DIR) and give DIR"
    )
