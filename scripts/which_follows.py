"""Make the questions of the task which-follows from the held-out text that ships with niwaki.

    python scripts/which_follows.py            # writes src/niwaki/data/which-follows.jsonl
    python scripts/which_follows.py --check    # fails if the file would change

A question is 60 words of the text and four times 8 words: those that follow, and those that follow in three other
questions, so that all choices have the same number of words, and each is right once and wrong three times. A
model that does not look at the context is right in a quarter of the questions. The text is cut anywhere, within
sentences too: for a small model whole sentences are next to impossible to tell apart. Questions do not overlap.
The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

from niwaki.texts.sources import read_text

FILE = Path(__file__).resolve().parent.parent / "src" / "niwaki" / "data" / "which-follows.jsonl"
QUESTIONS, CONTEXT, CHOICE, CHOICES = 300, 60, 8, 4
#: Questions before and after one from which it has no choices: they could continue it as well.
NEAR = 5


def stretches(text: str) -> list[tuple[str, str]]:
    """CONTEXT words and the CHOICE words after them, at even distances, without headings."""
    paragraphs = re.split(r"\n\s*\n", text)
    words = " ".join(p for p in paragraphs if not p.lstrip().startswith(("#", "-"))).split()
    starts = [i * len(words) // QUESTIONS for i in range(QUESTIONS)]
    assert len(words) // QUESTIONS >= CONTEXT + CHOICE
    cuts = [(start, start + CONTEXT, start + CONTEXT + CHOICE) for start in starts]
    return [(" ".join(words[a:b]), " ".join(words[b:c])) for a, b, c in cuts]


def questions(pairs: list[tuple[str, str]], seed: int) -> list[dict[str, object]]:
    """A question for each pair, with what follows in others as wrong choices."""
    drawn, count = random.Random(seed), len(pairs)
    wrong: list[list[int]] = [[] for _ in pairs]
    for _ in range(CHOICES - 1):
        others = list(range(count))
        drawn.shuffle(others)
        for i in range(count):  # exchange what does not fit until it does
            while not _fits(others[i], i, wrong[i], count):
                j = drawn.randrange(count)
                others[i], others[j] = others[j], others[i]
                # What came to j is looked at when its turn comes, or again where it had been.
                if j < i and not _fits(others[j], j, wrong[j], count):
                    others[i], others[j] = others[j], others[i]
        for chosen, other in zip(wrong, others, strict=True):
            chosen.append(other)
    answers = [i % CHOICES for i in range(count)]
    drawn.shuffle(answers)
    made: list[dict[str, object]] = []
    for (context, right), others, answer in zip(pairs, wrong, answers, strict=True):
        choices = [pairs[other][1] for other in others]
        choices.insert(answer, right)
        made.append({"context": context, "choices": choices, "answer": answer})
    return made


def _fits(other: int, i: int, chosen: list[int], count: int) -> bool:
    return NEAR < (other - i) % count < count - NEAR and other not in chosen


def main() -> None:
    """Writes the file, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    made = questions(stretches("".join(read_text("demo-held").pieces)), seed=0)
    lines = "".join(json.dumps(question) + "\n" for question in made)
    if asked.check:
        sys.exit(None if FILE.read_text() == lines else f"{FILE.name} is not what this script makes")
    FILE.write_text(lines)


if __name__ == "__main__":
    main()
