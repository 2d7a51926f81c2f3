"""The model card of a packed model: it loads in niwaki only, and the dense model's card says otherwise."""

from pathlib import Path

import yaml

from niwaki.errors import UsageError
from niwaki.files import output_errors
from niwaki.runs.model_card import top

_DENSE_CARD = "README.dense.md"
_LIBRARY = "niwaki"  # the library_name of a packed model's card, and of no other

_TEXT = """
# {name}, packed

The weights of a pruned model without its zeros ({sizes}). Only niwaki reads this format: transformers
says that there are no weights, and to delete `quantization_config`, which does not help.

    niwaki generate DIR "The old man"
    niwaki unpack DIR DENSE    # the dense model, byte for byte, which loads everywhere

```python
model = niwaki.load("DIR")  # a model of transformers
```
{dense}"""


def check(model: Path) -> None:
    """Raises UsageError where a model has a file with the name that its card is to get."""
    if (model / _DENSE_CARD).exists():
        raise UsageError(f"the model has a file {_DENSE_CARD}, where its README.md is to go; rename it")


def write(directory: Path, name: str, sizes: str) -> None:
    """Replaces the dense model's card, which becomes ``README.dense.md``."""
    readme, kept = directory / "README.md", directory / _DENSE_CARD
    dense = ""
    with output_errors(directory):
        about = top(readme)
        if readme.exists():
            readme.replace(kept)
            dense = f"\n[{_DENSE_CARD}]({_DENSE_CARD}) is the dense model's card: what it is, how it was pruned.\n"
        about |= {"library_name": _LIBRARY, "tags": sorted({*about.get("tags", []), "niwaki", "packed"})}
        head = yaml.safe_dump(about, sort_keys=False, allow_unicode=True)
        text = f"---\n{head}---\n" + _TEXT.format(name=name, sizes=sizes, dense=dense)
        readme.write_text(text, encoding="utf-8", errors="backslashreplace")  # names need not be text


def restore(directory: Path) -> None:
    """The opposite. A README.md that :func:`write` did not write, as of a model packed without it, stays."""
    readme, kept = directory / "README.md", directory / _DENSE_CARD
    with output_errors(directory):
        if kept.exists() or top(readme).get("library_name") == _LIBRARY:
            readme.unlink(missing_ok=True)
        if kept.exists():
            kept.replace(readme)
