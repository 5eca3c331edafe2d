"""Takes the program out of a chat's answer, as EvalPlus does: examples that call it are left out.

Knows: Markdown's code blocks, Python's syntax. Does not know: benchmarks, how programs are run.

A model often adds examples to a function, with wrong expectations, or until its tokens run out.
They tell nothing of the function.
"""

import ast
import itertools
import re
from collections.abc import Iterator

_CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)
_MAX_LINES = 120  # of a block; the search below parses each run of lines


def program_of(answer: str, tests: str) -> str:
    """Imports, and the functions, classes and variables that the tests need, directly or not."""
    tree = ast.parse(_longest_valid(code_of(answer)))
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    definitions = [(name, each) for each in tree.body for name in _defined(each)]
    needed, missing = set[str](), _names(_parsed(tests) or tree)
    while missing:
        needed |= missing
        used = [_names(each) for name, each in definitions if name in missing]
        missing = set[str]().union(*used) - needed
    kept = [each for each in tree.body if needed.intersection(_defined(each))]
    return "\n".join(map(ast.unparse, [*imports, *kept]))


def code_of(text: str) -> str:
    """The first code block of an answer; without any, all of it."""
    found = _CODE_BLOCK.search(text)
    return text if found is None else found.group(1)


def _longest_valid(code: str) -> str:
    """The longest run of lines that is a program."""
    if _parsed(code) is not None:
        return code
    lines = code.split("\n")[:_MAX_LINES]
    runs = itertools.combinations(range(len(lines) + 1), 2)
    for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
        some = "\n".join(lines[start:end])
        if _parsed(some) is not None:
            return some
    return ""


def _parsed(code: str) -> ast.Module | None:
    """None: no program, or one that is nested too deeply to be written again."""
    try:
        tree = ast.parse(code)
        ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
