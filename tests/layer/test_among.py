"""Patterns among the weights that are not zero already: the best masks there are, and no zero comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.patterns import NM, Among, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.solvers import Solver
from support.contract import CONTRACT, Promises
from support.covering import covering
from support.problems import generator, make_problem, normal, relative_error
from support.scores import PATTERNS, Scores, random_scores, tied_scores, zeros_of
from support.supports import SMALL, supports

ROWS, COLUMNS = 24, 32


def drawn(rows: int, columns: int, zeros: float, seed: int = 5) -> Tensor:
    """Where weights are: with another share of zeros in each row and column, about ``zeros`` overall."""
    uneven = torch.linspace(0.6, 1.4, rows)[:, None] * torch.linspace(1.4, 0.6, columns)
    return torch.rand(rows, columns, generator=generator(seed)) > zeros * uneven


# The mask


@pytest.mark.parametrize("pattern", SMALL, ids=str)
@given(
    st.lists(st.integers(0, 3), min_size=16, max_size=16),
    st.lists(st.booleans(), min_size=16, max_size=16),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=20)
@pytest.mark.slow
def test_of_all_masks_there_are_it_is_the_best(
    pattern: Pattern, values: list[int], there: list[bool], dtype: torch.dtype
) -> None:
    """By trying all supports of the pattern, each without what is zero already."""
    scores, places = torch.tensor(values, dtype=dtype).view(4, 4), torch.tensor(there).view(4, 4)
    mask = Among(pattern, places).mask(scores)
    possible = supports(pattern) * places.flatten()
    squares = scores.double().flatten().square()
    assert (possible == mask.flatten()).all(dim=1).any()
    assert float(squares[mask.flatten()].sum()) == float((possible @ squares).max())
    # And of these one with the most weights: zeros go before weights without a score.
    best = possible @ squares == (possible @ squares).max()
    assert int(mask.count_nonzero()) == int(possible[best].sum(dim=1).max())


@pytest.mark.parametrize("make", [random_scores, tied_scores])
@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.7, 1.0])
def test_counts(make: Scores, zeros: float) -> None:
    places = drawn(ROWS, COLUMNS, zeros) if 0 < zeros < 1 else torch.full((ROWS, COLUMNS), zeros == 0)
    scores, before = make(ROWS, COLUMNS), zeros_of(places)
    for sparsity in (0.0, 0.4, 0.5, 0.8):
        pattern = Among(Unstructured(sparsity), places)
        assert zeros_of(pattern.mask(scores)) == max(before, round(sparsity * scores.numel()))
        assert pattern.sparsity == pytest.approx(max(before / scores.numel(), sparsity))
        of_row = (~Among(PerRow(sparsity), places).mask(scores)).sum(dim=1)
        most = (~places).sum(dim=1)
        assert (of_row >= most).all()
        assert ((of_row == most) | ((of_row - sparsity * COLUMNS).abs() < 1)).all()
        assert (of_row >= int(sparsity * COLUMNS)).all()
    groups = (~Among(NM(2, 4), places).mask(scores)).view(-1, 4).sum(dim=1)
    assert torch.equal(groups, (~places).view(-1, 4).sum(dim=1).clamp(min=2))
    assert torch.equal(Among(Fixed(places), places).mask(scores), places)


def all_among(zeros: float = 0.4) -> list[Among]:
    return [Among(pattern, drawn(12, 96, zeros)) for pattern in PATTERNS]


@pytest.mark.parametrize("pattern", all_among(), ids=str)
def test_what_is_zero_stays_in_all_that_a_pattern_gives(pattern: Among) -> None:
    scores, places = tied_scores(12, 96) + 1, pattern.places
    before = scores.clone()
    mask = pattern.mask(scores)
    assert not (mask & ~places).any()
    masks = [pattern.partial(fraction).mask(scores) for fraction in (0, 0.1, 0.37, 0.9, 1)]
    for earlier, later in itertools.pairwise([*masks, mask]):
        assert (earlier | ~later).all()
    assert torch.equal(masks[0], places)
    assert torch.equal(masks[-1], mask)
    order = torch.arange(96).view(-1, pattern.group).flip(0).flatten()
    moved = pattern.reordered(order)
    assert torch.equal(moved.mask(scores), Among(pattern.pattern, places[:, order]).mask(scores))
    first = 48 // pattern.group * pattern.group
    runs, there = ([each[:, :first], each[:, first:]] for each in (scores, places))
    for part, run, there_ in zip(pattern.split(runs) or [], runs, there, strict=False):
        assert not (part.mask(run) & ~there_).any()
    distinct = random_scores(12, 96) + 0.1
    if (theta := pattern.threshold(distinct)) is not None:
        chosen, mask = distinct > theta, pattern.mask(distinct)
        assert not (mask & ~chosen).any()
        assert zeros_of(mask) - zeros_of(chosen) <= (12 if isinstance(pattern.pattern, PerRow) else 0)
    assert torch.equal(scores, before)
    for other in (0.0, 0.7):
        at, inner = pattern.at(other), pattern.pattern.at(other)
        assert (at is None) == (inner is None)
        if at is not None and inner is not None:
            assert torch.equal(at.mask(scores), Among(inner, places).mask(scores))


@pytest.mark.parametrize("width", [1, 5, 32, 96])
@pytest.mark.parametrize("pattern", [*all_among(), *all_among(0.9)], ids=str)
def test_runs_of_columns(width: int, pattern: Among) -> None:
    """They keep what the whole keeps, also where zeros are in some of the columns only."""
    scores, inner, places = random_scores(12, 96), pattern.pattern, pattern.places.clone()
    places[:, 60:] &= places[:, 30:66]
    places[:, :36] = False
    pattern, parts, end = Among(inner, places), [], 0
    for start, stop, choose in pattern.slices((12, 96), width):
        assert start == end < stop
        part, end = choose(scores[:, start:stop]), stop
        assert not (part & ~places[:, start:stop]).any()
        parts.append(part)
    mask, whole = torch.cat(parts, dim=1), pattern.mask(scores)
    assert mask.shape == (12, 96)
    if isinstance(inner, Unstructured | NM):
        assert zeros_of(mask) == zeros_of(whole)


def test_places_are_checked() -> None:
    with pytest.raises(PatternError, match=r"bool; got \(2, 2\) torch.float32"):
        Among(NM(2, 4), torch.ones(2, 2))
    places = torch.ones(4, 8, dtype=torch.bool)
    checks: list[Callable[[Among], object]] = [
        lambda p: p.mask(torch.ones(4, 12)),
        lambda p: next(p.slices((4, 12), 4)),
        lambda p: p.check((8, 8)),
    ]
    for check in checks:
        with pytest.raises(PatternError, match=r"\(4, 8\)"):
            check(Among(NM(2, 4), places))
    with pytest.raises(PatternError, match="divides"):
        Among(NM(2, 3), places).mask(torch.ones(4, 8))
    assert str(Among(NM(2, 4), places)) == "2:4"


# Solvers


OVER: list[Pattern] = [
    *(Unstructured(0.0), Unstructured(0.5), PerRow(0.6), NM(2, 4)),
    Fixed(normal(ROWS, COLUMNS, seed=78).abs() < 0.6),
]


@pytest.mark.parametrize(
    ("solver", "promises", "pattern", "zeros", "kind"),
    [
        pytest.param(*case, *rest, id="-".join(map(str, (case[0], *rest))))
        for case, *rest in covering(
            CONTRACT,
            OVER,
            (0.3, 0.7),
            ("correlated", "dead input", "few tokens"),
        )
    ],
)
@pytest.mark.slow
def test_no_solver_brings_them_back(
    solver: Solver, promises: Promises, pattern: Pattern, zeros: float, kind: str
) -> None:
    """Whatever the weights are that it is to come near: targets of the dense model are not zero there."""
    problem, places = make_problem(kind, rows=ROWS, dtype=torch.float32), drawn(ROWS, COLUMNS, zeros)
    solution = solver(problem, Among(pattern, places))
    assert not (solution.mask & ~places).any()
    assert torch.equal(solution.W != 0, solution.mask)
    assert not torch.signbit(solution.W[~solution.mask]).any()
    assert solution.error == pytest.approx(relative_error(problem, solution.W), rel=1e-5, abs=3e-8)
    new, before = zeros_of(solution.mask), zeros_of(places)
    if isinstance(pattern, Unstructured):
        assert new == max(before, round(pattern.sparsity * places.numel()))
    if isinstance(pattern, NM):
        of_group = (~solution.mask).view(-1, 4).sum(dim=1)
        assert torch.equal(of_group, (~places).view(-1, 4).sum(dim=1).clamp(min=2))
    if isinstance(pattern, PerRow):
        assert new >= round(pattern.sparsity * places.numel())
        assert ((~solution.mask).sum(dim=1) <= (~places).sum(dim=1).clamp(min=20) + promises.runs).all()
    if isinstance(pattern, Fixed):
        assert torch.equal(solution.mask, pattern.values & places)
