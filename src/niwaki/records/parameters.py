"""A solver or an effort as data: its "name", and its parameters by name.

Where a solver takes the mask of another, its parameters are "mask" and "update", each of them a solver as data.
"""

from __future__ import annotations

import ast
import contextlib
import json
from typing import Any

Described = dict[str, Any]


def plain(described: Described) -> Described:
    """With text in place of all values that JSON does not have, as solvers of the user's own may have them."""
    values: Described = json.loads(json.dumps(described, default=repr), parse_constant=str)
    return values


def in_words(described: Described) -> str:
    """``"admm-grad (iterations 20, rho 0.5)"``; with the mask of another ``"wanda + exact (memory 1)"``."""
    if "as written" in described:
        return str(described["as written"])
    if "mask" in described and "update" in described:
        return f"{in_words(described['mask'])} + {in_words(described['update'])}"
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in described.items()}
    values = ", ".join(f"{key} {value}" for key, value in shown.items() if key != "name")
    return f"{described['name']} ({values})" if values else str(described["name"])


def from_repr(text: str, name: str) -> Described:
    """What was a ``repr`` in old records: its values under ``name``, or as it was written if they are not all plain."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        match ast.parse(text, mode="eval").body:
            case ast.Call(ast.Name(), [], keywords):
                return plain({"name": name, **{str(each.arg): ast.literal_eval(each.value) for each in keywords}})
    return {"name": name, "as written": text}
