"""What follows a transformer in a directory of sentence-transformers."""

import json
from pathlib import Path

#: Which directories beside a transformer belong to a pipeline of sentence-transformers: layers that follow it.
_MODULES = "modules.json"


def pipeline(directory: Path) -> list[tuple[str, str]]:
    """Of each layer of the pipeline in ``directory`` its type, and its folder there; "" for the transformer itself.

    Nothing where there is no pipeline, or its file is nobody's.
    """
    try:
        values = json.loads((directory / _MODULES).read_text(encoding="utf-8"))
        return [(str(each.get("type")), each["path"]) for each in values]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
