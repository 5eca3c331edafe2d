"""What of a chat's answer is run."""

import pytest

from quill.model.benchmarks.answer_code import code_of, program_of
from quill.model.benchmarks.sandbox import run_program

TESTS = "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(double)\n"
DOUBLE = "def double(x):\n    return 2 * x"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nand\n```\ny\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```py\nx = 1", "x = 1"),  # cut off
        ("x = 1", "x = 1"),
    ],
)
def test_the_first_code_block_is_the_program(text: str, code: str) -> None:
    assert code_of(text) == code


@pytest.mark.parametrize(
    "example",
    [
        "assert double(1) == 3",  # the model is wrong about its own function
        "print(double([1, 2, 3, ",  # cut off at the last token
        "print(double(1))\n     3]",  # what it prints, written as if it were code
        "number = double(None)",
        "if __name__ == '__main__':\n    double(None)",
    ],
)
def test_examples_that_call_the_function_are_left_out(example: str) -> None:
    answer = f"Sure:\n```python\n{DOUBLE}\n\n{example}\n```"
    assert program_of(answer, TESTS) == DOUBLE


def test_what_the_function_needs_is_kept_in_its_order() -> None:
    code = (
        "import math\nTWO: int = 2\nFOUR = TWO + TWO\nUNUSED = 1 / 0\n\n"
        "def half(x):\n    return x * TWO / FOUR\n\n"
        "def double(x):\n    return math.floor(4 * half(x))"
    )
    program = program_of(f"```python\n{code}\n```", TESTS)
    assert "UNUSED" not in program
    assert program.index("TWO: int") < program.index("FOUR =") < program.index("def half")
    assert run_program(f"{program}\n{TESTS}").passed


TOO_DEEP = "```python\ndef double(x):\n    return " + "not " * 3000 + "x\n```"


@pytest.mark.parametrize("answer", ["", "I can't.", "```python\ndef double(\n```", TOO_DEEP])
def test_an_answer_without_a_program_is_an_empty_one(answer: str) -> None:
    assert program_of(answer, TESTS) == ""
