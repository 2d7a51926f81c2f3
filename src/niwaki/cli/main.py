"""How the command line begins and ends: at any moment with an exit code, and with one line for what went wrong."""

import errno
import functools
import io
import os
import re
import signal
import sys
import time
from typing import Any

from niwaki.arguments import meant_word
from niwaki.choices import BRIEFLY, LONG, SPINS
from niwaki.errors import NiwakiError, UsageError, first_line, shown
from niwaki.quantities import parse_number

# Before anything imports torch.
os.environ.setdefault(SPINS, LONG if sys.argv[1:2] == ["generate"] else BRIEFLY)
# The next file that is opened would get the number of a closed stream, and with it what is printed.
for _name in ("stdin", "stdout", "stderr"):
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "r+"))  # noqa: SIM115  (it stays)

#: Ctrl-C, what Slurm and ``timeout`` send, and the end of a terminal, which Windows does not have.
_STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

#: Of standard output: a full disk, a bad one, a closed stream, and "| head", which has what it wants.
_UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EPIPE)

#: Options that people write as commands: ``niwaki help prune``.
_AS_COMMANDS = {"help": "--help", "version": "--version"}


class _Stop:
    """Ends the command as Ctrl-C does, whichever signal asks for it; ``number`` is that of the signal."""

    def __init__(self) -> None:
        self.number, self._when = 0, -1.0

    def __call__(self, number: int, _: object) -> None:
        torch = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(torch, "_initializing", False):  # C++ calls Python, and an exception would end in an abort
            _say_what_stays()
            os._exit(128 + number)
        if time.monotonic() - self._when > 1:  # torchrun sends its own after that of the terminal; one cleans up
            self.number, self._when = number, time.monotonic()
            raise KeyboardInterrupt

    def again(self, ignored: Any) -> None:
        """``sys.unraisablehook``: Python ignores what is raised in some places, and this must not be lost there."""
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            import threading

            self._when = -1.0
            later = threading.Timer(0.1, os.kill, (os.getpid(), self.number))
            later.daemon = True
            later.start()
        else:
            sys.__unraisablehook__(ignored)


def main() -> None:
    """The entry point; docs/commands.md has the exit codes."""
    stop, hook, code, line = _Stop(), sys.unraisablehook, 0, ""
    if (screen := getattr(sys.modules.get("niwaki.cli.screen"), "Screen", None)) is not None:
        screen.current = None  # of a command before, in the same process
    heeded = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]  # as with nohup
    try:
        try:
            for number in heeded:
                signal.signal(number, stop)
            sys.unraisablehook = stop.again
            _run()
        finally:
            for number in heeded:
                signal.signal(number, signal.SIG_DFL)  # which prints nothing, whatever the interpreter is at
            sys.unraisablehook = hook
    except BaseException as error:
        code, line = _ending(error, stop.number)
        if not line and code > 128:
            _say_what_stays()
    if line:
        _say(line)
    sys.exit(code)


def _say_what_stays() -> None:
    """Prints what stays of an interrupted command; at the very beginning that is nothing."""
    screen = getattr(sys.modules.get("niwaki.cli.screen"), "Screen", None)
    if screen and screen.current:
        screen.current.interrupted()
    elif os.environ.get("RANK", "0") == "0":
        print("stopped before anything was done", file=sys.stderr)  # noqa: T201


def _run() -> None:
    """Runs the command that the arguments name."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # such as for "±" where the output is ASCII
    from niwaki.cli.common import writing

    command, (first, *others) = _commands(), sys.argv[1:] or [""]
    arguments = [*others, _AS_COMMANDS[first]] if first in _AS_COMMANDS else sys.argv[1:]
    with command.make_context("niwaki", arguments) as context:
        command.invoke(context)
    with writing(sys.stdout):
        sys.stdout.flush()  # what libraries printed


@functools.cache
def _commands() -> Any:
    """The commands, made once: that takes long where one after the other runs in a process."""
    from typer.main import get_command

    from niwaki.cli.app import app

    return get_command(app)


def _ending(error: BaseException, number: int) -> tuple[int, str]:
    """The exit code, and the line that says what was wrong; ``number`` is that of the signal that came, 0 for none."""
    chain: BaseException | None = error
    while chain is not None:  # libraries make other errors of it, and so does what cannot be cleaned up
        if isinstance(chain, KeyboardInterrupt):
            return 128 + (number or signal.SIGINT), ""
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None), ""
    if isinstance(error, NiwakiError):
        return error.exit_code, str(error)
    if hasattr(error, "exit_code"):  # of the library for command lines; no text where it printed help or a version
        _reword(error)
        text = error.format_message() if hasattr(error, "format_message") else ""
        context = getattr(error, "ctx", None)
        return error.exit_code, text and f"{text} (see {context.command_path if context else 'niwaki'} --help)"
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and not error.filename:
        from niwaki.cli.common import silence

        silence(sys.stdout)  # of the help; all else goes by common.py
        return 1, "" if error.errno == errno.EPIPE else f"standard output cannot be written: {error.strerror}"
    if isinstance(error, MemoryError) or ("alloc" in str(error) and "memory" in str(error)):
        return 1, f"there is not enough memory: {first_line(error)}; docs/troubleshooting.md lists ways to use less"
    if isinstance(error, ImportError) and number:  # a library that was being imported forgets what ended that
        return 128 + number, ""
    if isinstance(error, ImportError):
        return 1, f"a library cannot be loaded: {first_line(error)}; is it fully installed, and is there enough memory?"
    if _in_import(error):
        hint = "does an environment variable have a value that it cannot read?"
        return 1, f"a library cannot be loaded: {type(error).__name__}: {first_line(error)}; {hint}"
    return 70, f"this is a bug in niwaki: {type(error).__name__}: {first_line(error)}; {_report(error)}"


def _reword(error: Any) -> None:
    """Says what the library for command lines does not: which value is no number, and what a value too many may be."""
    if extra := re.fullmatch(r"Got unexpected extra argument\S* \((.*)\)", str(getattr(error, "message", ""))):
        error.message = f"unexpected {shown(extra[1])}; a value goes after its option, in quotes if it has blanks"
    if not hasattr(error.__cause__, "errors"):  # of pydantic
        return
    details = error.__cause__.errors()[0]
    given, wanted = details["input"], {"int": "a whole number", "float": "a number"}
    if kind := wanted.get(details["type"].partition("_")[0]):
        error.message = f"{shown(given)} is not {kind}{_number_meant(given)}"
    else:
        error.message = error.message.removeprefix("Value error, ")
        if choice := re.fullmatch(r"'(.*)' is not one of (.*)\.", error.message):
            meant = meant_word(choice[1], re.findall(r"'([^']*)'", choice[2]))
            error.message = error.message.removesuffix(".") + meant


def _number_meant(given: str) -> str:
    """A question where ``given`` is a number such as "4k" or "1,000"."""
    try:
        number = parse_number(given)
    except UsageError:
        return ""
    if "." in given:
        return ""
    also = f" or {number // 1000 * 1024}" if given.lower().endswith("k") else ""
    return f"; did you mean {number}{also}?"


def _in_import(error: BaseException) -> bool:
    """Whether a library raised it while niwaki imported it, as over a variable of the environment that it reads."""
    import traceback

    import niwaki

    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = os.path.join(os.path.dirname(niwaki.__file__), "")
    last = max((i for i, code in enumerate(codes) if code.co_filename.startswith(ours)), default=0)
    return any(code.co_name == "<module>" for code in codes[last + 1 :])


def _report(error: BaseException) -> str:
    """Saves the traceback to a file; returns what is to be done with it."""
    import tempfile
    import traceback

    import niwaki

    try:
        descriptor, name = tempfile.mkstemp(prefix="niwaki-", suffix=".txt", text=True)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            print(f"niwaki {niwaki.__version__}, Python {sys.version}, {sys.platform}: {sys.argv}", file=file)
            traceback.print_exception(error, file=file)
    except OSError:
        return "its traceback could not be saved"
    return f"please report it with the file {name}"


def _say(line: str) -> None:
    from rich.text import Text

    from niwaki.cli.common import Terminal

    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"error in process {os.environ.get('RANK', 0)}: " if several else "error: "
    Terminal(stderr=True).print(Text.assemble((who, "bold red"), " ".join(line.split())), soft_wrap=True)
