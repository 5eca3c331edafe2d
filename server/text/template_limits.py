"""A Jinja environment that limits how long a template runs and how much memory it takes.

Knows: Jinja's syntax tree and its sandbox. Does not know: what templates render.

A template comes with somebody's weights. Jinja's sandbox keeps it from everything but the
processor and memory, so these are counted here: steps (turns of loops, calls of macros, entries of
lists), characters that are written, and the sizes of what operators, filters and methods are
applied to, before they are.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 4 * 2**20  # of one text
MAX_WRITTEN = 4 * MAX_CHARACTERS  # of all that is written, into variables too
MAX_STEPS = 200_000
MAX_RENDER_S = 1.0  # of processor time: on a busy machine nobody's template is to blame
MAX_NUMBER = 100_000  # as an argument: widths, counts
MAX_PRODUCT = (
    2**26
)  # of the sizes of two arguments: what one becomes if it replaces parts of another
MAX_NUMBER_BITS = 4096  # of a power or a product
_NUMBERS = re.compile(r"\d{1,20}")
_GIVEN_WIDTH = re.compile(r"\*|:[^}]*\{")  # of a format, among its values


class RenderLimitError(Exception):
    """A template that takes too long, or makes too much."""


class _Render(threading.local):
    """What the rendering under way in this thread has used."""

    num_steps = 0
    num_written = 0
    end_s = float("inf")

    def add_steps(self, number: int = 1) -> None:
        self.num_steps += number
        if self.num_steps > MAX_STEPS:
            raise RenderLimitError(f"it takes more than {MAX_STEPS} steps")
        if time.thread_time() > self.end_s:
            raise RenderLimitError(f"it takes longer than {MAX_RENDER_S:g} s")


_render = _Render()


@contextmanager
def rendering() -> Iterator[None]:
    """Within it, this thread renders one template."""
    _render.num_steps = _render.num_written = 0
    _render.end_s = time.thread_time() + MAX_RENDER_S
    try:
        yield
    finally:
        _render.num_steps, _render.end_s = 0, float("inf")


def count_step() -> None:
    """At the beginning of each turn of a loop and of each macro."""
    _render.add_steps()


def _size(value: Any) -> int:
    """Characters and entries, of all that is within."""
    size, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str | bytes | bytearray):
            size += len(each)
        elif isinstance(each, dict | list | tuple | set):
            _render.add_steps(len(each))
            waiting += [*each, *each.values()] if isinstance(each, dict) else each
        size += 1
        if size > MAX_CHARACTERS:
            raise RenderLimitError(f"it makes more than {MAX_CHARACTERS} characters")
    return size


def _check_arguments(name: str, values: Sequence[Any]) -> None:
    """Of a filter or a method, its own value first."""
    _render.add_steps()
    if name.startswith("format"):
        _size(values)
        _check_format(values[0], values[1:])
        return
    sizes = [_size(each) for each in values]
    for number in values[1:]:
        if isinstance(number, int):
            sizes.append(abs(number))
            if abs(number) > MAX_NUMBER:
                raise RenderLimitError(f"it uses {number}, and {MAX_NUMBER} is the limit")
    sizes.sort()
    if len(sizes) > 1 and sizes[-1] * sizes[-2] > MAX_PRODUCT:
        raise RenderLimitError(f"it makes more than {MAX_CHARACTERS} characters")


def _check_format(text: Any, values: Any) -> None:
    """Widths stand in the text, or among the values."""
    numbers = [int(each) for each in _NUMBERS.findall(text)] if isinstance(text, str) else []
    if _GIVEN_WIDTH.search(str(text)):
        values = values if isinstance(values, tuple | list) else (values,)
        numbers += [abs(each) for each in values if isinstance(each, int)]
    if sum(numbers) > MAX_NUMBER:
        raise RenderLimitError(f"it writes numbers wider than {MAX_NUMBER}")


def _finite(value: Any) -> Any:
    """A generator's values, counted."""
    if not isinstance(value, Iterator):
        return value
    values = []
    for each in value:
        _render.add_steps()
        values.append(each)
    return values


def limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments first."""

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        args = tuple(map(_finite, args))
        _check_arguments(name, (*args, *options.values()))
        return function(*args, **options)

    return checked


def _write(value: Any) -> Any:
    """Each value before it is written."""
    _render.num_written += _size(value)
    if _render.num_written > MAX_WRITTEN:
        raise RenderLimitError(f"it makes more than {MAX_WRITTEN} characters")
    return value


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """For templates that render within `rendering()`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_write, **options)
        del self.globals["lipsum"]
        self.filters = {name: limited(name, each) for name, each in self.filters.items()}

    def parse(self, *args: Any, **options: Any) -> nodes.Template:
        """With a step in each loop and macro."""
        parsed = super().parse(*args, **options)
        _CountSteps().visit(parsed)
        parsed.set_environment(self)
        return parsed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _render.add_steps()
        if operator == "+":
            _size((left, right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_NUMBER_BITS:
                raise RenderLimitError("it computes a product that is too large")
        elif operator == "*" and not (_is_number(left) and _is_number(right)):
            count = next((each for each in (left, right) if isinstance(each, int)), 1)
            if count * max(_size(left), _size(right)) > MAX_CHARACTERS:
                raise RenderLimitError(f"it makes more than {MAX_CHARACTERS} characters")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_NUMBER_BITS:
                raise RenderLimitError("it computes a power that is too large")
        elif operator == "%":
            _check_format(left, right)
            _size((left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:
        """Methods of values, too; `str.format` is Jinja's own by then."""
        receiver = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(receiver, str | bytes | int | float | list | dict | tuple):
            args = tuple(map(_finite, args))
            name = getattr(function, "__name__", "")
            _check_arguments(name, (receiver, *args, *options.values()))
        return super().call(context, function, *args, **options)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


class _CountSteps(NodeTransformer):
    """Loops and macros begin with a step; `~` becomes `+`, which the environment sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def _counted(self, node: nodes.Node) -> nodes.Node:
        node = self.generic_visit(node)
        name = nodes.ImportedName(f"{__name__}.{count_step.__name__}")
        step = nodes.ExprStmt(nodes.Call(name, [], [], None, None))
        node.body.insert(0, step)  # type: ignore[attr-defined]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = [nodes.Filter(each, "string", [], [], None, None) for each in node.nodes]
        joined: nodes.Expr = parts[0]
        for part in parts[1:]:
            joined = nodes.Add(joined, part)
        return joined
