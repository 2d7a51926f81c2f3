"""A solver or an effort as data: its "name", and its parameters by name.

Where a solver takes the mask of another, its parameters are "mask" and "update", each of them a solver as data.
"""

from __future__ import annotations

import ast
import json
from typing import Any

Described = dict[str, Any]

#: Of old records: the names of classes that are called otherwise, and of efforts by some of their parameters.
_NAMES = {"OBSSaliency": "obs", "ConjugateGradients": "cg"}
_EFFORTS: dict[tuple[Any, ...], str] = {
    ("uniform", 0, 0, 0): "fast",
    ("loss", 0.5, 0, 0.4): "balanced",
    ("loss", 0.5, 0.5, 1): "best",
}


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


def from_repr(text: str, method: str) -> Described:
    """What was a ``repr`` in old records; as it was written, by the name of the ``method``, if it is not readable."""
    try:
        return _parsed(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {"name": method, "as written": text}


def _parsed(node: ast.expr) -> Described:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError(ast.dump(node))
    values: Described = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(ast.dump(node))
        nested = isinstance(keyword.value, ast.Call)
        values[keyword.arg] = _parsed(keyword.value) if nested else ast.literal_eval(keyword.value)
    return plain({"name": _name(node.func.id, values), **values})


def _name(kind: str, values: Described) -> str:
    if kind == "MaskThenUpdate":
        return f"{values['mask']['name']}+{values['update']['name']}"
    if kind == "ADMM":
        return "admm1" if values.get("sparsification_steps") == 1 else "admm-grad"
    if kind == "Descent":
        return str(values.get("method", "adam"))
    if kind == "Effort":
        told = tuple(values.get(key) for key in ("allocation", "importance", "synthetic", "epochs"))
        return _EFFORTS.get(told, "effort")
    return _NAMES.get(kind, kind.lower())
