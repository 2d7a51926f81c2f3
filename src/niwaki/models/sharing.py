"""Matrices that several blocks compute with, such as those of Zamba, which uses one transformer at several depths.

Each belongs to the first of these blocks, where it is pruned; the later ones compute with what it has become.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from niwaki.models.layout import Matrix
from niwaki.records.wording import counted

#: What to note where blocks are fitted.
NOT_FITTED = "matrices that several blocks share are not fitted to the outputs of any of them"


def by_first_use(used: Sequence[list[Matrix]]) -> tuple[list[list[Matrix]], list[list[Matrix]]]:
    """What each block prunes, and what it shares with an earlier one, of the matrices that each computes with."""
    blocks: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for matrix in (matrix for matrices in used for matrix in matrices):
        blocks[matrix.entry].append(matrix.block)
    own: list[list[Matrix]] = [[] for _ in used]
    shared: list[list[Matrix]] = [[] for _ in used]
    for index, matrices in enumerate(used):
        for matrix in matrices:
            first, *others = blocks[matrix.entry]
            matrix = replace(matrix, blocks=(first, *others) if others else ())
            (own if index == first else shared)[index].append(matrix)
    return own, shared


def only_in(
    blocks: range, own: list[list[Matrix]], shared: list[list[Matrix]]
) -> tuple[list[list[Matrix]], list[list[Matrix]], list[str]]:
    """What is left of :func:`by_first_use` where only ``blocks`` are pruned, and what to note about it."""
    own = [matrices if index in blocks else [] for index, matrices in enumerate(own)]
    chosen = {matrix.entry for matrices in own for matrix in matrices}
    there = range(len(shared))[blocks.start : blocks.stop]  # a configuration may name others
    left = {matrix.entry for index in there for matrix in shared[index]} - chosen
    notes = list[str]()
    if left:
        which = counted(len(left), "matrix is", "matrices are")
        notes.append(f"{which} shared with blocks before these, where alone they would be pruned: they stay")
    return own, [[matrix for matrix in matrices if matrix.entry in chosen] for matrices in shared], notes


def sharing_notes(matrices: Iterable[Matrix], fits: bool) -> list[str]:
    """What to note about those of ``matrices`` that several blocks compute with, in a run that ``fits`` blocks."""
    groups: dict[tuple[int, ...], int] = defaultdict(int)
    for matrix in matrices:
        if matrix.blocks:
            groups[matrix.blocks] += 1
    parts = [
        f"blocks {', '.join(map(str, blocks))} share {counted(count, 'matrix', 'matrices')}"
        for blocks, count in groups.items()
    ]
    if not parts:
        return []
    note = (
        f"{'; '.join(parts)}: each is pruned once, in the first of its blocks, on its inputs in all of them, of which "
        "those of later blocks are the dense model's"
    )
    return [note, NOT_FITTED] if fits else [note]
