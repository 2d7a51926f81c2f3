"""Solvers as text and as data."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from niwaki.errors import UnknownNameError, UsageError
from niwaki.layer.solvers import (
    ADMM,
    RIA,
    SOLVERS,
    Continuation,
    Descent,
    Exact,
    Magnitude,
    MaskThenUpdate,
    Wanda,
    describe,
    make_solver,
)


@dataclass(frozen=True)
class Mine(Magnitude):
    """A solver of somebody else."""

    strength: float = 2.0


@pytest.mark.parametrize("name", [*SOLVERS, "wanda+exact", "wanda+ria+exact"])
def test_a_name_is_what_it_was_given_as(name: str) -> None:
    assert describe(make_solver(name))["name"] == name


@pytest.mark.parametrize(
    ("solver", "text"),
    [
        (Continuation(sweeps=20, softness=0.1 + 0.2), "continuation:sweeps=20:softness=0.30000000000000004"),
        (Descent(iterations=50), "adam:iterations=50"),
        (Descent("sgd", learning_rate=0.5), "sgd:learning_rate=0.5"),
        (Descent("sgd"), "sgd:learning_rate=0.1"),
        (ADMM(schedule="cubic"), "admm-grad:schedule=cubic"),
        (ADMM(rho=1e15), "admm-grad:rho=1e15"),
        (Continuation(penalty_start=0.05, finish=3), "continuation:penalty_start=0.05:finish=3"),
        (MaskThenUpdate(ADMM(schedule="cubic"), Exact()), "admm-grad:schedule=cubic+exact"),
        (ADMM(iterations=7, sparsification_steps=1), "admm1:iterations=7"),
        (
            MaskThenUpdate(MaskThenUpdate(Wanda(), RIA(power=0.25)), Exact(damping=1e-05)),
            "wanda+ria:power=0.25+exact:damping=1e-05",
        ),
    ],
)
def test_text_that_is_read_back(solver: ADMM, text: str) -> None:
    assert make_solver(text) == solver
    assert describe(solver)["name"] == "+".join(part.split(":")[0] for part in text.split("+"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sparsgpt", "no solver is called 'sparsgpt'; did you mean sparsegpt"),
        ("xyz", "known: magnitude, wanda, ria, sparsegpt"),
        ("continuation:penalty_begin=1", "no parameter of continuation is called 'penalty_begin'; did you mean"),
        ("sparsegpt:dampening=1", "did you mean damping"),
        ("adam:steps=3", "'steps'"),
        ("adm:rho=1", "'adm'"),
    ],
)
def test_unknown_names(text: str, said: str) -> None:
    with pytest.raises(UnknownNameError, match=said):
        make_solver(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("magnitude:rho=1", "magnitude has no parameters; got rho"),
        ("wanda:rho=1", "wanda has no parameters; got rho"),
        ("adam:iterations", "adam:NAME=VALUE"),
        ("admm-grad:iterations=many", "iterations='many': admm-grad wants int here"),
        ("admm-grad:iterations=2.5", "iterations='2.5': admm-grad wants int here"),
        ("admm-grad:rho=", "rho='': admm-grad wants float here"),
        ("admm-grad:iterations=0", "iterations must be 1 or more; got 0"),
        ("admm-grad:schedule=cube", "schedule must be constant, cubic or printed; got 'cube'"),
        ("sparsegpt:damping=-0.1", "damping must be 0 or more; got -0.1"),
        ("continuation:penalty_end=0.1", r"penalty_end must be at least penalty_start \(0.3\); got 0.1"),
    ],
)
def test_values_that_they_cannot_have(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_solver(text)


def test_parameters_as_data() -> None:
    assert describe(ADMM()) == {
        "name": "admm-grad",
        "iterations": 20,
        "sparsification_steps": 15,
        "schedule": "constant",
        "rho": 1.0,
        "damping": 0.1,
    }
    assert describe(MaskThenUpdate(Wanda(), replace(Exact(), damping=0.1))) == {
        "name": "wanda+exact",
        "mask": {"name": "wanda"},
        "update": {"name": "exact", "damping": 0.1, "memory": 1.0},
    }
    for solver in SOLVERS.values():
        assert json.loads(json.dumps(describe(solver))) == describe(solver)


def test_a_solver_of_another_class_goes_by_its_name() -> None:
    assert describe(Mine(3.0)) == {"name": "mine", "strength": 3.0}
    assert describe(MaskThenUpdate(Mine(), Exact()))["name"] == "mine+exact"
