"""What is done for the model as a whole, in addition to what the solver does to each matrix."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from niwaki.arguments import check_fields, checked_names
from niwaki.errors import UsageError
from niwaki.quantities import changed, check_known, find, name_of, parameters, parse_name, text_of
from niwaki.records.wording import in_words

Allocation = Literal["uniform", "error", "loss"]


def _check(name: str, value: float, is_accepted: bool, range_: str) -> None:
    if not is_accepted:
        raise UsageError(f"{name} must be {range_}; got {value!r}")


@checked_names
@dataclass(frozen=True)
class Planning:
    """How zeros are allocated and which outputs count more, as decided on the dense model before pruning begins.

    Attributes:
        allocation: How zeros are shared out among the matrices, where the pattern leaves that open: the same sparsity
            for all ("uniform"), or by "loss" or "error", see :mod:`niwaki.pruning.plan`.
        importance: How strongly the squared errors of outputs are weighted by the sensitivity of the model's loss to
            them when weights are chosen. It is a power, from 0 (not at all) to 1 (in full), for patterns in which rows
            compete.
        pilot: Fraction of the calibration text used for these two, at least one sample per process.
        together: How many consecutive outputs of a matrix make up for each other's rounding, at most, by what errors of
            several cost the loss together; 0 where each is rounded alone. It looks at up to about 16,384 tokens, and
            takes up to 1 GiB.

    Raises:
        UsageError: a value is out of range.
    """

    allocation: Allocation = "uniform"
    importance: float = 0.0
    pilot: float = 0.0625
    together: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        _check("importance", self.importance, 0 <= self.importance <= 1, "from 0 to 1")
        _check("pilot", self.pilot, 0 < self.pilot <= 1, "above 0, to 1")
        _check("together", self.together, self.together != 1 and 0 <= self.together <= 4096, "0, or 2 to 4,096")

    @property
    def is_needed(self) -> bool:
        """Whether the dense model has to be run before pruning."""
        return self.allocation != "uniform" or self.importance > 0 or self.together > 0

    def without_predictions(self) -> "Planning":
        """The nearest plan that needs no predictions of the next token."""
        allocation: Allocation = "error" if self.allocation == "loss" else self.allocation
        return replace(self, allocation=allocation, importance=0.0, together=0)


@checked_names
@dataclass(frozen=True)
class Fitting:
    """How the remaining weights of a block are fitted to the outputs of the dense block: :mod:`niwaki.models.training`.

    Attributes:
        epochs: Passes over the calibration text; 0 for no fit, 0.5 for half of the text.
        rate: Learning rate, relative to the root mean square of each matrix's weights.
        batch: Tokens per step, over all processes; each process takes at least one sample.
        uniform_epochs: Least number of epochs, unless ``epochs`` is 0, where the pattern gives all matrices the same
            sparsity (n:m): the time that sharing out zeros would take goes into the fit instead.

    Raises:
        UsageError: a value is out of range.
    """

    epochs: float = 0.0
    rate: float = 0.01
    batch: int = 512
    uniform_epochs: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        _check("epochs", self.epochs, 0 <= self.epochs < math.inf, "0 or more")
        _check("rate", self.rate, 0 < self.rate < math.inf, "above 0")
        _check("batch", self.batch, self.batch >= 1, "1 or more")
        _check("uniform_epochs", self.uniform_epochs, 0 <= self.uniform_epochs < math.inf, "0 or more")

    def tokens_per_part(self, processes: int) -> int:
        """Tokens per step in each of this many ``processes``."""
        return max(1, self.batch // processes)


@checked_names
@dataclass(frozen=True)
class Effort:
    """What is done for the model as a whole, beyond each matrix. The default is the plain layer-wise method.

    Attributes:
        plan: How zeros are shared out, and which outputs count more.
        synthetic: Windows of text that the dense model writes itself, per window of calibration text, to which they are
            added; see :mod:`niwaki.texts.own`. If the whole model does not fit in half of the memory, or cannot
            write text, there are none, and a note says so.
        fit: How each block is fitted to the dense one.
        healing: Tokens on which the result is then trained towards the dense model's predictions, per token of
            calibration text, see :func:`niwaki.heal`; 0 for no healing. A model that cannot be healed as a whole is not
            healed, and a note says so.

    Raises:
        UsageError: a value is out of range.
    """

    plan: Planning = Planning()
    synthetic: float = 0.0
    fit: Fitting = Fitting()
    healing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        _check("synthetic", self.synthetic, 0 <= self.synthetic < math.inf, "0 or more")
        _check("healing", self.healing, 0 <= self.healing < math.inf, "0 or more")

    def settled(self, shares_zeros: bool, predicts: bool = True, writes: bool = True) -> "Effort":
        """The part of this effort that applies to a given pattern and model.

        If no matrix may have more zeros than another (not ``shares_zeros``), the fit takes its ``uniform_epochs``. A
        model that does not predict the tokens of its calibration text (not ``predicts``) writes no text either, nor
        does one that can write only from a source (not ``writes``).
        """
        plan, synthetic, epochs = self.plan, self.synthetic, self.fit.epochs
        if not predicts:
            plan = plan.without_predictions()
        if not (predicts and writes):
            synthetic = 0.0
        if epochs and not shares_zeros:
            epochs = max(epochs, self.fit.uniform_epochs)
        return replace(self, plan=plan, synthetic=synthetic, fit=replace(self.fit, epochs=epochs))


_OF_LOSS = Planning("loss", importance=0.5, together=1024)
#: By name on the command line.
EFFORTS: dict[str, Effort] = {
    "fast": Effort(),
    "balanced": Effort(_OF_LOSS, synthetic=0.25, fit=Fitting(epochs=0.3, uniform_epochs=0.6)),
    "best": Effort(_OF_LOSS, synthetic=0.5, fit=Fitting(epochs=1), healing=1),
    "heal": Effort(_OF_LOSS, synthetic=0.5, fit=Fitting(epochs=1), healing=3),
}

DEFAULT_EFFORT = "balanced"
#: Methods as they were published.
PLAIN_EFFORT = "fast"
#: Of quantizing alone: weights go to the nearest numbers of the grid, and no text is read.
NO_EFFORT = "none"
#: Of what is left of a smaller model, which is fitted to more text than zeros are: docs/structured.md.
SHRINK_EFFORT = "balanced:synthetic=0.5"


def usual_effort(*methods: object) -> str:
    """The default effort: the plain one if any of ``methods`` is given, that is not None."""
    return DEFAULT_EFFORT if all(method is None for method in methods) else PLAIN_EFFORT


def make_effort(name: str) -> Effort:
    """The effort called ``name``, with parameters as in ``best:epochs=3``; raises UsageError where it is not valid."""
    name, given = parse_name(name)
    if name == NO_EFFORT:
        raise UsageError(
            "the effort none only rounds weights to a grid: it is for quantize, without zeros, a solver and parameters"
        )
    effort = find("effort", name, {**EFFORTS, NO_EFFORT: Effort()})  # which may have been meant
    check_known(name, given, _flat(effort))
    for part in ("plan", "fit"):
        value = getattr(effort, part)
        own = {key: given.pop(key) for key in [*given] if key in parameters(value)}
        effort = replace(effort, **{part: changed(name, value, own)})
    return changed(name, effort, given)


def describe(effort: Effort, asked: Effort | None = None) -> dict[str, Any]:
    """The effort as data, for records: all parameters, and a "name", of the nearest in ``EFFORTS``.

    That is the name of what was ``asked`` for, if that is given: of it ``effort`` is what applies.
    """
    return {"name": name_of(asked or effort, EFFORTS, _flat), **_flat(effort)}


def effort_text(effort: Effort) -> str:
    """The text for :func:`make_effort` to make ``effort`` of, such as "best:epochs=3"."""
    return text_of(effort, EFFORTS, _flat)


def _flat(effort: Any) -> dict[str, Any]:
    """All parameters of an effort and its parts by name, as records and the command line have them."""
    return {
        **parameters(effort.plan),
        "synthetic": effort.synthetic,
        **parameters(effort.fit),
        "healing": effort.healing,
    }


def described(effort: dict[str, Any]) -> str:
    """A record's effort in words: "balanced (allocation loss, epochs 0.3)", without what is as in the plain one."""
    plain = _flat(Effort())
    said = {key: value for key, value in effort.items() if key not in plain or value != plain[key]}
    said.pop("uniform_epochs", None)  # where it counts, it is among the epochs
    return in_words(said)
