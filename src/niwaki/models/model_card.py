"""The model card of a directory: its README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load


def top(readme: Path) -> dict[str, Any]:
    """What stands between the lines ``---`` of a card, with a list of texts as its tags; empty if that cannot be read.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        found = (metadata_load(readme) if readme.is_file() else None) or {}
    except (ValueError, yaml.YAMLError, RecursionError):  # no YAML at the top, or none that makes sense
        return {}
    tags = found.get("tags")
    tags = [tags] if isinstance(tags, str) else tags if isinstance(tags, list) else []
    return {**found, "tags": [tag for tag in tags if isinstance(tag, str)]}
