"""Paths that somebody gave, files written whole or not at all, room on the disk, and the lock on a directory."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
from huggingface_hub import cached_assets_path

from niwaki.choices import ExportFormat
from niwaki.errors import CheckpointError, OutputError, UsageError, either, first_line

#: How the names of files for llama.cpp end.
GGUF = ".gguf"


def given_path(given: str | os.PathLike[str], longer: int = 0) -> Path:
    """``given`` with ~ as the home directory; UsageError where no file can be, as behind a loop of links.

    There may also be names with ``longer`` more characters, as temporary files have.
    """
    try:
        if not os.fspath(given):
            raise ValueError("it is empty")
        path = Path(given).expanduser()
        whole = path.absolute()
        str(whole).encode()  # safetensors opens no other names
        there = nearest(whole.parent)
        # A name below what is not there is looked at only here: the system looks no further.
        for each in (whole, *(there / name for name in Path(f"{whole}{'x' * longer}").relative_to(there).parts)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                each.stat()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{str(given)!r} cannot be used as a path: {reason}") from error
    return path


def is_model(source: str | os.PathLike[str]) -> bool:
    """Whether ``source``, where masks are from, is a model, and not the name of a solver."""
    return given_path(source).is_dir() or "/" in os.fspath(source)


def weights_size(directory: Path) -> int:
    """Bytes of the files in ``directory`` that have a model's weights, dense, packed or for llama.cpp."""
    return sum(file.stat().st_size for ending in (".safetensors", GGUF) for file in directory.glob(f"*{ending}"))


def is_gguf_file(out: str | os.PathLike[str], form: str) -> bool:
    """Whether ``out`` is one file for llama.cpp, by its name; UsageError where ``form`` is a format of directories."""
    if Path(out).suffix.lower() != GGUF:
        return False
    if not form.startswith("gguf"):
        formats = either(each for each in get_args(ExportFormat) if each.startswith("gguf"))
        raise UsageError(f"{out} would be a file for llama.cpp; its format is {formats}")
    return True


def nearest(path: Path) -> Path:
    """The absolute ``path``, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def check_replaced(path: Path, ours: Callable[[BinaryIO], bool], hint: str) -> None:
    """UsageError, which ends with ``hint``, unless ``path`` is free, empty, or a file that is ``ours``."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                if ours(file):
                    return
        elif path.is_file() or not path.exists():  # an empty one, and a link to nothing
            return
    except (OSError, ValueError, RecursionError):
        pass  # it is not ours, whatever it is
    raise UsageError(f"{path} exists and {hint}; choose another name, or move it away")


def replace_file(path: Path, content: str | bytes, sync: bool = False) -> None:
    """Writes ``content`` to ``path``, all of it or nothing (OutputError); with ``sync`` it is on disk at the return."""
    raw = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content  # as names need
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EEXIST, "it is a directory or a device")
        path.parent.mkdir(parents=True, exist_ok=True)
        for stray in path.parent.glob(f"{glob.escape(path.name)}.tmp????????"):  # of a process that was killed
            with contextlib.suppress(OSError, UsageError), locked(stray, path):
                stray.unlink()
        # Named before it is there, so that a signal between the two leaves nothing behind.
        temporary = path.with_name(f"{path.name}.tmp{secrets.token_hex(4)}")
        try:
            temporary.touch(exist_ok=False)
            with locked(temporary, path):
                with temporary.open("wb") as file:
                    file.write(raw)
                    if sync:
                        file.flush()
                        os.fsync(file.fileno())
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def set_usual_mode(path: Path, mode: int) -> None:
    """Gives ``path`` the mode it would have without ``tempfile``, which makes everything private."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(mode & ~umask)


@contextlib.contextmanager
def new_file(path: Path, ours: Callable[[BinaryIO], bool]) -> Iterator[Path]:
    """A file to write beside ``path``, which it becomes at the end; after an error nothing is left of it.

    UsageError where ``path`` is there, another process is writing it, or something else has the temporary name, as
    anything but an empty file or one that is ``ours`` has: what a killed process left is written anew.
    """
    temporary = path.with_name(f".{path.name}.partial")
    if temporary.is_symlink():
        raise UsageError(f"{temporary} is a link, and {path} would be written there first; move it away")
    check_replaced(temporary, ours, f"is not a partial {path.suffix} file, and {path} would be written there first")
    with output_errors(path.parent):
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0), 0o600)
        made = os.fstat(descriptor)
        os.close(descriptor)
        with locked(temporary, path):
            if not os.path.samestat(made, temporary.lstat()):  # another process has come to its end meanwhile
                raise UsageError(f"{path} was being written by another run; repeat the command")
            try:
                if os.path.lexists(path):
                    raise UsageError(f"{path} exists; choose another name or remove it")
                yield temporary
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                set_usual_mode(temporary, 0o666)
                if os.path.lexists(path):
                    raise OutputError(f"{path} is there now, of another program; move it away and repeat the command")
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


@contextlib.contextmanager
def output_errors(path: Path, hint: str = "the output is as large as the model") -> Iterator[None]:
    """Turns an OSError into an OutputError of one line, which ends with ``hint`` if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(path, hint) from error
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def input_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into a CheckpointError of one line: ``path``, of a model, is not there any more."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def check_space(path: Path, needed: int) -> None:
    """Raises OutputError where ``needed`` bytes are not free for ``path``."""
    if needed > free_space(path):
        raise _no_space(path, f"the output needs {needed / 2**30:.2f} GiB")


def reserve(file: BinaryIO, size: int) -> None:
    """Makes the file ``size`` bytes long, on disk and not only in name where the system can do that."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    file.truncate(size)


def _no_space(path: Path, hint: str) -> OutputError:
    return OutputError(f"no space left on disk for {path} ({free_space(path) / 2**30:.2f} GiB are free); {hint}")


def free_space(path: Path) -> int:
    """Bytes that are free where ``path`` is or will be."""
    return shutil.disk_usage(nearest(path.absolute())).free


@contextlib.contextmanager
def locked(directory: Path, out: Path, shared: bool = False) -> Iterator[None]:
    """Locks ``directory`` against other processes, or raises UsageError where one has locked it, to write ``out``.

    The lock ends with the process, however that ends. Several may have a ``shared`` one, to see that nobody writes.
    """
    # Not filelock: that leaves a file behind, here in the output, and cannot lock the directory itself.
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{out} is being written by another run that has not ended") from None
        yield
    finally:
        os.close(descriptor)


def digests(directory: Path, sync: bool = False, ends: tuple[str, ...] = ("",)) -> dict[str, str]:
    """SHA-256 of each file below ``directory`` whose name has one of these ``ends``, by its path there.

    With ``sync`` they are on disk at the return.
    """
    return {
        path.relative_to(directory).as_posix(): digest(path, sync)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name.endswith(ends)
    }


def digest(path: Path, sync: bool = False) -> str:
    """SHA-256 of a file; with ``sync`` it is on disk at the return."""
    with path.open("r+b" if sync else "rb") as file:
        value = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # of either mode
        if sync:
            os.fsync(file.fileno())
    return value.hexdigest()


# What earlier calls found out and left on disk, beside what transformers keeps there (``HF_HOME``).


def cached_directory(kind: str, asked: Any, name: str = "") -> Path:
    """The directory for what is found of this ``kind``: the same for all who ask the same, and for nobody else.

    Its name begins with ``name``. OSError or ValueError where there can be none.
    """
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
    return Path(cached_assets_path("niwaki", kind, f"{name}{key}"))


def read_cached(file: Path, kind: Any) -> Any:
    """What :func:`write_cached` wrote; None where that is not there, or is anything else than ``kind``."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(file.read_bytes(), type=kind)
    return None


def write_cached(file: Path, value: Any) -> None:
    """Writes ``value``, as JSON; NiwakiError where that is not possible."""
    replace_file(file, msgspec.json.encode(value))
