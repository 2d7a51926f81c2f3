"""The model card of a packed model: it loads in niwaki only, and the dense model's card says otherwise."""

from pathlib import Path

from niwaki.files import output_errors
from niwaki.runs.model_card import DENSE_CARD, top, write_card_of_form

_LIBRARY = "niwaki"  # the library_name of a packed model's card, and of no other

_TEXT = """
# {name}, packed

The weights of a model without its zeros, or as whole numbers of a few bits ({sizes}).
Only niwaki reads this format: transformers
says that there are no weights, and to delete `quantization_config`, which does not help.

    niwaki generate DIR "The old man"
    niwaki unpack DIR DENSE    # the dense model, which loads everywhere

```python
import niwaki

model = niwaki.load("DIR")  # a model of transformers
```
"""


def write(directory: Path, name: str, sizes: str) -> None:
    """Replaces the dense model's card, which becomes ``README.dense.md``."""
    text, dense = _TEXT.format(name=name, sizes=sizes), "the dense model's card: what it is, how it was pruned"
    write_card_of_form(directory, _LIBRARY, {"niwaki", "packed"}, text, dense)


def restore(directory: Path) -> None:
    """The opposite. A README.md that :func:`write` did not write, as of a model packed without it, stays."""
    readme, kept = directory / "README.md", directory / DENSE_CARD
    with output_errors(directory):
        if kept.exists() or top(readme).get("library_name") == _LIBRARY:
            readme.unlink(missing_ok=True)
        if kept.exists():
            kept.replace(readme)
