"""The kinds of attack, each a module with

prepare(place)         makes what its cases share in an empty directory
case(chance, place)    does one case in an empty directory, with what ``chance`` gives, and says in a few words how it
                       ended as it should; AssertionError where it did not
"""

from __future__ import annotations

from types import ModuleType

from campaign import (
    arguments,
    calls,
    comparisons,
    decoding,
    disk,
    exports,
    ggufs,
    kills,
    models,
    packed,
    records,
    solvers,
    stages,
    texts,
)
from support import faults

KINDS: dict[str, ModuleType] = {
    "arguments": arguments,
    "calls": calls,
    "comparisons": comparisons,
    "decoding": decoding,
    "exports": exports,
    "ggufs": ggufs,
    "models": models,
    "packed": packed,
    "records": records,
    "solvers": solvers,
    "texts": texts,
}
if faults.POSSIBLE:
    KINDS |= {"disk": disk, "kills": kills, "stages": stages}
