"""Everything that niwaki raises on purpose.

Each message is one line: what is wrong, which value or file, and what to try.
"""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator


class NiwakiError(Exception):
    """Something failed that the user can act on: the base of all others."""

    exit_code = 1


class UsageError(NiwakiError, ValueError):
    """What was asked for makes no sense, whatever the model; the exit code is 2."""

    exit_code = 2


class PatternError(UsageError):
    """A sparsity or an n:m that is not possible, in general or for this matrix."""


class UnknownNameError(UsageError):
    """No ``kind``, such as a solver, parameter or option, of that name; the message gives the nearest ``known`` ones.

    ``instead`` is said where none is near and they are too many to list.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], instead: str = "") -> None:
        known = list(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else instead or f"known: {', '.join(known)}"
        super().__init__(f"no {kind} is called {shown(name)}; {hint}")


class CheckpointError(NiwakiError):
    """A model directory that cannot be read or trusted."""


class UnsupportedModelError(NiwakiError):
    """A sound model of a kind that niwaki does not know."""


class CalibrationError(NiwakiError):
    """A text that is not available, or is too short."""


class TaskError(NiwakiError):
    """A task whose questions are not available or cannot be asked."""


class NumericalError(NiwakiError):
    """NaN or infinity where a number should be, or a matrix beyond repair."""


class OutputError(NiwakiError):
    """The result cannot be written, or is not what was meant to be written."""


class WorkerError(NiwakiError):
    """Another process of the run has ended."""


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Puts ``name`` in front of what is raised, unless it is "" or in it already, or another process has ended."""
    try:
        yield
    except NiwakiError as error:
        if name in str(error) or isinstance(error, WorkerError):
            raise
        error.args = (f"{name}: {error}",)
        raise


def first_line(error: BaseException) -> str:
    """What another library's error says first, for a message of one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: Exception) -> str:
    """All that another library's error says; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def raised_as(
    kind: type[NiwakiError],
    what: str,
    of: type[Exception] | tuple[type[Exception], ...] = Exception,
    hint: str = "",
    reason: Callable[[Exception], str] = first_line,
) -> Iterator[None]:
    """Raises what is ``of`` these kinds, by default of any, as a ``kind`` that says ``what``, the reason and a hint.

    What niwaki itself has raised stays as it is.
    """
    try:
        yield
    except NiwakiError:
        raise
    except of as error:
        raise kind(f"{what}: {reason(error)}{hint}") from error


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Around calls of libraries in Rust, whose panics are no Exceptions: raises RuntimeError in their place."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(str(error)) from error
        raise


def shown(value: object) -> str:
    """``value`` as a message of one line can have it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def either(words: Iterable[str]) -> str:
    """``"one, two or three"``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
