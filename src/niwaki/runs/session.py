"""What runs have from the call that they belong to, such as the command line, and not from their arguments."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.processes import World

T = TypeVar("T")


class Session(NamedTuple):
    """What all runs of a call share.

    Attributes:
        command: The command line, for records; "" where niwaki was called from Python.
        world: The processes that share the work.
        memory: What was found out about models, for the next run of the same call; None where there is one run alone.
    """

    command: str = ""
    world: World = World()
    memory: dict[Hashable, object] | None = None


_session: ContextVar[Session] = ContextVar("session")


def current_session() -> Session:
    """The session that this call belongs to."""
    return _session.get(None) or Session()


@contextlib.contextmanager
def session(command: str = "", world: World | None = None) -> Iterator[None]:
    """A session for all calls within."""
    token = _session.set(Session(command, world or World()))
    try:
        yield
    finally:
        _session.reset(token)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """A session whose runs do not find out twice what they would find the same: see :func:`remembered`."""
    now = current_session()
    token = _session.set(now if now.memory is not None else now._replace(memory={}))
    try:
        yield
    finally:
        _session.reset(token)


def remembered(what: str, checkpoint: Checkpoint, arguments: Hashable, find: Callable[[], T]) -> T:
    """What ``find`` finds out of a model and ``arguments``, or an earlier run of this call found out of the same files.

    It has to be the same each time, and is not to be changed.
    """
    memory = current_session().memory
    if memory is None:
        return find()
    files = ((name, (checkpoint.path / name).stat()) for name in checkpoint.shards)
    stamps = tuple((name, found.st_ino, found.st_mtime_ns, found.st_size) for name, found in files)
    key = (what, str(checkpoint.path), stamps, arguments)
    if key not in memory:
        memory[key] = find()
    return memory[key]  # type: ignore[return-value]
