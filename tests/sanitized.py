"""Puts a library with sanitizers in the place of the operators': a plugin of `make test-sanitize`.

`pytest -p tests.sanitized` loads it before any test. Sessions have no arena: in an arena tensors
are neighbors, and reading beyond one of them isn't noticed.
"""

import os
from pathlib import Path

import onnxruntime

from quill.export.operators import library

LIBRARY = Path(os.environ["QUILL_SANITIZED"])


class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.enable_cpu_mem_arena = self.enable_mem_pattern = False


library.library_path = lambda: LIBRARY
onnxruntime.SessionOptions = Options
