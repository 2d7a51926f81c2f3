"""Everything that niwaki raises on purpose.

Each message is one line: what is wrong, which value or file, and what to try.
"""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator


class NiwakiError(Exception):
    """An error that the user can act on; the base class of all errors that niwaki raises on purpose."""

    exit_code = 1


class UsageError(NiwakiError, ValueError):
    """The request is not valid, whatever the model; the exit code is 2."""

    exit_code = 2


class PatternError(UsageError):
    """The sparsity or pattern is not possible, either in general or for this matrix."""


class UnknownNameError(UsageError):
    """No solver, parameter, option or other ``kind`` has that name; the message suggests the nearest ``known`` ones.

    If none is near, the message says ``instead``, or lists all known names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], instead: str = "") -> None:
        known = list(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else instead or f"known: {', '.join(known)}"
        super().__init__(f"no {kind} is called {shown(name)}; {hint}")


class CheckpointError(NiwakiError):
    """The model directory cannot be read or is damaged."""


class UnsupportedModelError(NiwakiError):
    """The model is sound, but niwaki does not support models of this kind."""


class CalibrationError(NiwakiError):
    """The text is not available or is too short."""


class TaskError(NiwakiError):
    """The task's questions are not available or cannot be asked."""


class NumericalError(NiwakiError):
    """A number is NaN or infinite, or a matrix cannot be factorized."""


class OutputError(NiwakiError):
    """The result cannot be written, or what was written is not what was meant."""


class WorkerError(NiwakiError):
    """Another process of the run has ended."""


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Puts ``name`` before the message of an error raised within.

    The message stays as it is if ``name`` is "" or in it already, or if another process has ended.
    """
    try:
        yield
    except NiwakiError as error:
        if name in str(error) or isinstance(error, WorkerError):
            raise
        error.args = (f"{name}: {error}",)
        raise


def first_line(error: BaseException) -> str:
    """The first line of the message of another library's error; its class if it has no message."""
    said = str(error).strip().removeprefix("Got: ")  # as the hub's client begins
    return (said or type(error).__name__).splitlines()[0]


def one_line(error: Exception) -> str:
    """The whole message of another library's error, in one line; its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def raised_as(
    kind: type[NiwakiError],
    what: str,
    of: type[Exception] | tuple[type[Exception], ...] = Exception,
    hint: str = "",
    reason: Callable[[Exception], str] = first_line,
) -> Iterator[None]:
    """Turns errors ``of`` these classes, by default of any, into a ``kind`` that says ``what``, the reason and a hint.

    Errors that niwaki itself has raised stay as they are.
    """
    try:
        yield
    except NiwakiError:
        raise
    except of as error:
        raise kind(f"{what}: {reason(error)}{hint}") from error


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises RuntimeError where a library in Rust panics within: panics are not subclasses of Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(str(error)) from error
        raise


def shown(value: object) -> str:
    """``value`` as it can stand in a message of one line."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # of tables in tables without end, and of thousands of digits
        return f"a value of type {type(value).__name__} too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def either(words: Iterable[str]) -> str:
    """The words as ``"one, two or three"``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
