"""Which version of the code makes bundles: a hash of its sources, so that no number is forgotten.

Knows: what decides over a bundle's bytes. Does not know: bundles. It imports only the standard
library.
"""

import hashlib

from quill.cache import code_hash
from quill.export.operators.library import library_path

# A bundle depends on all of the packages `export` and `model` but these.
NOT_EXPORTER = (
    *("export/cli/inspect.py", "export/cli/models.py", "export/cli/passages.py"),
    *("export/cli/speed.py", "export/commands.py", "export/convert"),
    *("model/benchmarks", "model/commands.py", "model/evaluation", "model/training"),
)


def exporter_version() -> str:
    """Of the code that makes bundles and computes with them."""
    code = library_path().name + code_hash(("export", "model"), NOT_EXPORTER)
    return hashlib.sha256(code.encode()).hexdigest()[:16]
