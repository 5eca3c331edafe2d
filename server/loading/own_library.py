"""Sees to it that the library of Quill's own operators is there: no server chooses tokens without.

Knows: how to have it compiled. Does not know: what is in it.

Set-up compiles it (`make serve`, the Dockerfile). Where only a wheel was installed the first server
does: it takes a minute, and a compiler.
"""

import logging
import subprocess
import sys

from quill.export.operators.library import operators_problem
from quill.server.errors import StartError

logger = logging.getLogger(__name__)

BUILD = (sys.executable, "-m", "quill.export.operators.build")


def require_library() -> None:
    """Compiles it if it isn't there. An error says what to install."""
    problem = operators_problem()
    if problem is None:
        return
    logger.info("%s; compiling them now, which takes a minute", problem)
    done = subprocess.run(BUILD, capture_output=True, text=True, check=False)
    left = operators_problem()
    if left is not None:
        raise StartError(f"{left}. Compiling them failed: {done.stderr.strip() or 'in silence'}")
