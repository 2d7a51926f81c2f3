"""What the command line knows of a run and a call from Python does not."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from niwaki.models.processes import World


class Session(NamedTuple):
    """The command line, for records, "" where niwaki was called from Python; and the processes that share the work."""

    command: str = ""
    world: World = World()


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
