"""The tables and the picture in the documentation are those of the records in the repository."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import results

from support.scripts import run_script

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_tables_and_picture_are_those_of_the_records() -> None:
    assert not run_script(ROOT / "benchmarks" / "results.py", "--check")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_has_the_numbers_of_the_table(theme: str) -> None:
    """Whatever version of the library drew it; what marks say of themselves is in the file."""
    cells = json.loads((ROOT / "benchmarks" / "results" / "protocol.json").read_text())["cells"]
    page = (ROOT / "docs" / "methods.md").read_text()
    picture = (ROOT / "docs" / "figures" / f"zeros-{theme}.svg").read_text()
    assert f"figures/zeros-{theme}.svg" in page
    said = re.findall(r'aria-label="([^":]+), (\d+) % zeros: ([\d.]+)"', picture)
    shown = {(name, f"{percent} %"): value for name, percent, value in said}
    names = {"wanda": "Wanda", "admm-grad": "ADMM-Grad", "continuation@balanced": "niwaki"}
    names["continuation@best"] = "niwaki --effort best"
    for cell in cells:
        name = names.get(cell["method"])
        if name and cell["pattern"].endswith("%"):
            value = f"{cell['perplexity']['demo-held']['value']:.2f}"
            assert shown[name, cell["pattern"]] == value
            assert re.search(rf"\| {cell['method']} .*\b{value}\b", page)
    assert f'aria-label="dense: {cells[0]["perplexity"]["demo-held"]["value"]:.2f}"' in picture


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_are_not_over_each_other(theme: str) -> None:
    """Nor over points, in a font of the usual width; read from the file."""
    picture = (ROOT / "docs" / "figures" / f"sizes-{theme}.svg").read_text()
    said = r'<text aria-label="[^"]*"[^>]*text-anchor="(\w+)" transform="translate\(([\d.]+),([\d.]+)\)[^>]*>([^<]*)'
    boxes = {}
    for anchor, x, y, label in re.findall(said, picture):
        width = 5.5 * len(label)
        left = float(x) - (width if anchor == "end" else 0)
        boxes[label] = (left, left + width, float(y) - 9, float(y) + 2)
    points = re.findall(r'aria-roledescription="point" transform="translate\(([\d.]+),([\d.]+)\)', picture)
    assert len(boxes) == len(points) == 10
    boxes |= {f"point {x} {y}": (float(x) - 3, float(x) + 3, float(y) - 3, float(y) + 3) for x, y in points}
    over = [
        (one, other)
        for one, other in itertools.combinations(boxes, 2)
        if all(boxes[one][i] < boxes[other][i + 1] and boxes[other][i] < boxes[one][i + 1] for i in (0, 2))
    ]
    assert over == []


@pytest.mark.slow
def test_what_differs_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table, the picture's numbers and a missing picture; and then it is written."""
    real = results.record

    def changed(name: str) -> object:
        found = real(name)
        if name == "protocol":
            found["cells"][0]["perplexity"]["demo-held"]["value"] += 1.0
        return found

    texts = {path: path.read_text() for path in results.render()}
    copies = {tmp_path / path.relative_to(ROOT): text for path, text in texts.items()}
    for path, text in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results.py", "--check"])
    with pytest.raises(SystemExit) as left:
        results.main()
    assert left.value.code == 0
    monkeypatch.setattr(results, "record", changed)
    (tmp_path / "docs" / "figures" / "zeros-dark.svg").unlink()
    with pytest.raises(SystemExit) as left:
        results.main()
    for name in ("methods.md", "zeros-light.svg", "zeros-dark.svg"):
        assert name in str(left.value.code)
    assert "`make results`" in str(left.value.code)
    monkeypatch.setattr(sys, "argv", ["results.py"])
    results.main()
    assert "| dense | 41.35 |" in (tmp_path / "docs" / "methods.md").read_text()
    assert 'aria-label="dense: 41.35"' in (tmp_path / "docs" / "figures" / "zeros-dark.svg").read_text()
    assert texts == {path: path.read_text() for path in texts}


def test_what_a_family_refuses_is_refused_in_a_line() -> None:
    """And not by an error that nobody foresaw; the families are many."""
    families = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text())["families"]
    lines = [(name, cell, line) for name, each in families.items() for cell, line in each["cells"].items()]
    assert [each for each in lines if each[2].startswith("FAILED")] == []
    assert [name for name, cell, line in lines if cell in ("prune", "quantize") and line] == []
    assert len(families) > 30
