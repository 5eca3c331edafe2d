"""Whether Quill's custom operators can be tested here: `make test` builds them."""

import pytest

from quill.export.operators.library import operators_problem
from quill.export.precisions import Precision

PROBLEM = operators_problem()
needs_operators = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
OWN: tuple[Precision, ...] = () if PROBLEM else ("quill4", "quill8")
# What a bundle of a test is served in: the plainest, and integers.
SERVED: tuple[Precision, ...] = ("fp32", *OWN)
# Rows of a crowd. One of them is enough under emulation, where each takes half a minute.
CROWDS = [1, 3, pytest.param(8, marks=pytest.mark.portable)]
