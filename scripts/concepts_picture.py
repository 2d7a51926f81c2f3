"""Draws the picture of docs/concepts.md, for light and for dark pages: docs/figures/concepts-light.svg and -dark.svg.

python scripts/concepts_picture.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
WIDTH, HEIGHT = 900, 500
TEXT = (
    "A recipe is a list of stages. A stage goes through the model one block at a time: calibration text gives the "
    "Gram matrix of each matrix's inputs, a solver takes the matrix, its Gram matrix and a pattern, and its new "
    "weights are written before the block runs again."
)


@dataclass(frozen=True)
class Theme:
    """Colours of lines and words, of boxes, and of what stands out."""

    ink: str
    soft: str
    box: str
    frame: str
    strong: str
    on_strong: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#ffffff", "#eef3ee", "#2e7d32", "#ffffff"),
    "dark": Theme("#e6edf3", "#9aa4af", "#262c36", "#1b2129", "#66bb6a", "#10160f"),
}


def box(x: int, y: int, width: int, height: int, words: str, theme: Theme, *, is_strong: bool = False) -> str:
    """A box with a line of words in its middle, or several."""
    fill, ink = (theme.strong, theme.on_strong) if is_strong else (theme.box, theme.ink)
    lines = words.split("\n")
    top = y + height / 2 - 8 * (len(lines) - 1) + 5
    said = "".join(
        f'<text x="{x + width / 2:g}" y="{top + 16 * i:g}" text-anchor="middle" fill="{ink}">{line}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{theme.soft}"/>' + said
    )


def words(x: int, y: int, text: str, theme: Theme, anchor: str = "start", weight: str = "normal") -> str:
    """Words beside what they belong to."""
    fill = theme.ink if weight == "bold" else theme.soft
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{text}</text>'


def arrow(path: str, theme: Theme, dash: str = "") -> str:
    """A line with a head at its end; a dashed one has none."""
    end = f'stroke-dasharray="{dash}"' if dash else 'marker-end="url(#head)"'
    return f'<path d="{path}" fill="none" stroke="{theme.soft}" stroke-width="1.5" {end}/>'


def cells(x: int, y: int, rows: list[str], theme: Theme) -> str:
    """A matrix of small squares: filled where there is a "#"."""
    squares = []
    for i, row in enumerate(rows):
        for j, each in enumerate(row):
            fill = theme.strong if each == "#" else "none"
            place = f'x="{x + 12 * j}" y="{y + 12 * i}" width="10" height="10"'
            squares.append(f'<rect {place} fill="{fill}" stroke="{theme.soft}" stroke-width="0.7"/>')
    return "".join(squares)


def drawn(theme: Theme) -> str:
    """The picture."""
    frame = f'rx="10" fill="{theme.frame}" stroke="{theme.soft}" stroke-opacity="0.5"'
    parts = [f'<rect x="10" y="10" width="880" height="104" {frame}/>', words(26, 34, "Recipe", theme, weight="bold")]
    parts.append(words(90, 34, "a list of stages, recipe.toml", theme))
    stages = ("shrink", "prune", "quantize", "heal", "pack or export")
    for i, stage in enumerate(stages):
        parts.append(box(90 + 150 * i, 52, 118, 44, stage, theme, is_strong=stage == "prune"))
        parts.append(arrow(f"M{60 + 150 * i if i == 0 else 58 + 150 * i},74 H{86 + 150 * i}", theme))
    parts.append(arrow("M808,74 H846", theme))
    parts += [words(56, 79, "model", theme, "end"), words(850, 79, "OUT", theme)]

    parts.append(f'<rect x="10" y="150" width="880" height="340" {frame}/>')
    parts += [arrow("M240,98 L20,150", theme, "4 4"), arrow("M358,98 L880,150", theme, "4 4")]
    parts += [words(26, 176, "Stage", theme, weight="bold"), words(76, 176, "one block at a time", theme)]

    parts.append(box(30, 200, 120, 44, "calibration\ntext", theme))
    parts.append(words(30, 286, "hidden states", theme))
    parts.append(arrow("M90,244 V268", theme))
    parts.append(arrow("M90,292 V322", theme))
    for i, name in enumerate(("block 0", "block 1", "...", "block 29")):
        parts.append(box(30, 326 + 36 * i, 120, 30, name, theme, is_strong=i == 1))
    parts.append(arrow("M150,377 C190,377 180,330 206,330", theme))

    parts += [box(210, 216, 150, 214, "", theme), words(285, 238, "Block", theme, "middle", "bold")]
    for i, name in enumerate(("q_proj", "k_proj", "v_proj", "...", "down_proj")):
        parts.append(box(226, 250 + 34 * i, 118, 27, name, theme))

    parts += [words(470, 208, "Gram matrix", theme, "middle", "bold")]
    parts.append(cells(435, 220, ["##.#..", "###...", ".###..", "#.####", "...##.", "...#.#"], theme))
    parts.append(words(470, 308, "H = XᵀX / tokens", theme, "middle"))
    parts.append(arrow("M360,255 H426", theme))
    parts.append(words(393, 246, "inputs X", theme, "middle"))
    parts.append(arrow("M360,345 H586", theme))
    parts.append(words(470, 338, "weights W", theme, "middle"))
    parts += [words(470, 378, "Pattern, 2:4", theme, "middle", "bold")]
    parts.append(cells(423, 388, ["##..#.#.", ".##.##..", "#..#..##"], theme))

    parts.append(box(590, 315, 100, 60, "Solver", theme, is_strong=True))
    parts.append(arrow("M516,255 C560,255 560,330 586,330", theme))
    parts.append(arrow("M528,405 C560,405 560,360 586,360", theme))

    parts += [words(795, 300, "New weights", theme, "middle", "bold")]
    parts.append(cells(748, 316, ["##..#.#.", ".##.##..", "#..#..##", "##...##.", "#.#.##.."], theme))
    parts.append(arrow("M690,345 H740", theme))
    parts.append(arrow("M795,382 V466 H285 V434", theme))
    parts.append(words(560, 458, "written to OUT; the block runs again with them", theme, "middle"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
            ' font-family="system-ui, -apple-system, Segoe UI, Helvetica, sans-serif" font-size="14" role="img">',
            f"<title>{TEXT}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{theme.soft}"/></marker></defs>',
            *parts,
            "</svg>",
            "",
        ]
    )


def pictures() -> dict[Path, str]:
    """The files and their text."""
    return {FIGURES / f"concepts-{name}.svg": drawn(theme) for name, theme in THEMES.items()}


def main() -> None:
    """Writes them."""
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
