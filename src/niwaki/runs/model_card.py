"""The model card of a directory: its README.md."""

import re
from pathlib import Path
from typing import Any

import yaml

from niwaki.errors import UsageError
from niwaki.files import output_errors
from niwaki.records.record import Record
from niwaki.records.wording import markdown

#: The card of a model that was written in another form, whose own card says what that is.
DENSE_CARD = "README.dense.md"
_NOTES = "\n\nNotes:\n\n"
_LONGEST = 2**20  # characters of what stands at the top of a card


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes no aliases: a card needs none, and a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def top(readme: Path) -> dict[str, Any]:
    """What stands between the lines ``---`` of a card, with a list of texts as its tags; empty if that is not valid."""
    try:
        text = readme.read_text(encoding="utf-8-sig") if readme.is_file() else ""
        match = re.match(r"\s*---\n(.*?)\n---[ \t]*(?:\n|$)", text[:_LONGEST], re.DOTALL)
        values = yaml.load(match[1], _Loader) if match else None  # noqa: S506 - derived from the safe one
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError):  # as that library does
        return {}
    if not isinstance(values, dict):
        return {}
    tags = values.get("tags")
    tags = tags if isinstance(tags, list) else [tags]
    return {**values, "tags": [tag for tag in tags if isinstance(tag, str)]}


def notes(record: Record) -> str:
    """The end of a pruned model's card."""
    listed = "\n".join(f"* {markdown(note)}" for note in record.notes)
    has = "the full record: versions, command" + (", and every matrix" if record.matrices else " and curve")
    full = f"`niwaki.json` has {has}." + (
        " That of the pruning, if it has one, is `niwaki.base.json`." * record.only_heals
    )
    return f"{_NOTES if listed else ''}{listed}\n\n{full}\n"


def restate(directory: Path, old: str, new: str = "") -> None:
    """Leaves out the note ``old`` of the record in ``directory``, if there is one, and adds ``new``."""
    file = directory / "niwaki.json"
    if file.is_file() and (new or old.encode() in file.read_bytes()):
        record = Record.load(file)
        record.notes = [note for note in record.notes if note != old] + [new] * bool(new)
        record.save(file)


def check_card(model: Path) -> None:
    """UsageError where ``model`` has a file with the name that its card is to get in another form of it."""
    if (model / DENSE_CARD).exists():
        raise UsageError(f"the model has a file {DENSE_CARD}, where its README.md belongs; rename it")


def write_card_of_form(
    directory: Path, library: str, tags: set[str], text: str, own: str, *, measured: bool = True
) -> None:
    """Writes the card of a model in another form: ``text``, for those who load it with ``library``.

    The model's own card becomes ``README.dense.md``, of which the text says that it is ``own``; what stands at its top
    stays in the new one, without what was ``measured`` where that is not true of this form.
    """
    readme, dense = directory / "README.md", ""
    with output_errors(directory):
        about = top(readme)
        if readme.exists():
            readme.replace(directory / DENSE_CARD)
            dense = f"\n[{DENSE_CARD}]({DENSE_CARD}) is {own}.\n"
        if not measured:
            about.pop("model-index", None)
        about |= {"library_name": library, "tags": sorted({*about.get("tags", []), *tags})}
        head = yaml.safe_dump(about, sort_keys=False, allow_unicode=True)
        # Names need not be text.
        readme.write_text(f"---\n{head}---\n{text}{dense}", encoding="utf-8", errors="backslashreplace")
