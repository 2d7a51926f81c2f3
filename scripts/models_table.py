# ruff: noqa: E402 - tests/support is found only now
"""Writes the table of docs/models.md from the table of families and the tiny models of the tests.

python scripts/models_table.py           # after a change of src/niwaki/models/structure.py or tests/support/models.py
python scripts/models_table.py --check   # fails if the file would change
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import FAMILIES
from niwaki.records.wording import kind
from support.models import CASES, save_model

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- models -->", "<!-- end of models -->"


def matrices(family: str) -> list[str]:
    """What is pruned in the family's blocks, by module: "mlp.experts.*: gate_up_proj, down_proj"."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in (name for name in CASES if name.split()[0] == family):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = Checkpoint(save_model(Path(directory) / "model", case))
            for matrix in StreamedModel(checkpoint, "cpu", "float32").matrices():
                name = kind(matrix.name)
                if name.endswith(".*"):  # all experts in one tensor
                    name = name[:-2].replace("experts.", "experts.*.")
                module, _, last = name.rpartition(".")
                if last not in found[module]:
                    found[module].append(last)
    return [f"`{module}`: {', '.join(names)}" if module else ", ".join(names) for module, names in found.items()]


def table() -> str:
    """The table in Markdown."""
    rows = ["| `model_type` | pruned in each block | remark |", "|---|---|---|"]
    rows += [f"| `{name}` | {'; '.join(matrices(name))} | {remark} |" for name, remark in FAMILIES.items()]
    return "\n".join(rows)


def main() -> int:
    """Writes or checks the page."""
    old = PAGE.read_text()
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    new = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if "--check" in sys.argv:
        if new != old:
            print(f"{PAGE} is not up to date; run python scripts/models_table.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
