"""The budget of the house: fails above so many lines of code or modules, or with a circle of imports.

    python scripts/house.py --lines 24000 --modules 190

Lines of code are those of src/niwaki without blanks, comments and docstrings. An import counts wherever it stands, also
in a function and for types alone: what import-linter sees is the direction between packages, not a circle in one.
"""

import argparse
import ast
import graphlib
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "niwaki"
LONGEST = 60
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines of ``text`` that have code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """Those of ``modules`` that are imported anywhere in a module."""
    asked = [
        (f"{node.module}.{alias.name}", node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    ]
    return {name if name in modules else module for name, module in asked} & modules


def main() -> None:
    """Prints the lines of each package, and what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, required=True)
    parser.add_argument("--modules", type=int, required=True)
    allowed = parser.parse_args()
    files = {
        ".".join(("niwaki", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in sorted(SOURCE.rglob("*.py"))
    }
    counts, graph, wrong = Counter[str](), dict[str, set[str]](), list[str]()
    for name, file in files.items():
        text = file.read_text("utf-8")
        tree = ast.parse(text)
        code = code_lines(text, tree)
        counts[name.split(".")[1] if name.count(".") > 1 else ""] += len(code)
        graph[name] = imports(tree, set(files)) - {name}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
                if length > LONGEST:
                    wrong.append(f"{node.name} in {name} has {length} lines, more than {LONGEST}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        wrong.append(f"a circle of imports: {' <- '.join(error.args[1])}")
    total = sum(counts.values())
    if total > allowed.lines:
        wrong.append(f"{total:,} lines of code, {total - allowed.lines:,} more than the budget: take something away")
    if len(files) > allowed.modules:
        wrong.append(f"{len(files)} modules, {len(files) - allowed.modules} more than the budget")
    for package, lines in counts.most_common():
        print(f"{package or 'modules beside packages':24s}{lines:7,}")
    print(f"{total:,} lines of code in {len(files)} modules")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
