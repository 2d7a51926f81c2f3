"""The kinds of attack, each a module with

prepare(place)         makes what its cases share in an empty directory
case(chance, place)    does one case in an empty directory, with what ``chance`` gives, and says in a few words how it
                       ended as it should; AssertionError where it did not
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from support import faults

_NAMES = ("arguments", "calls", "comparisons", "decoding", "exports", "ggufs", "models", "packed", "records", "solvers")
_WITH_FAULTS = ("disk", "kills", "stages") if faults.POSSIBLE else ()

KINDS: dict[str, ModuleType] = {name: import_module(f"campaign.{name}") for name in (*_NAMES, "texts", *_WITH_FAULTS)}
