"""Where Quill keeps what it fetches and makes: wheels, checkpoints, bundles, peers' models.

Knows: the environment. Does not know: what lies there. Every room asks here.
"""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$QUILL_CACHE, or a directory in the user's own cache."""
    return Path(os.environ.get("QUILL_CACHE") or "~/.cache/quill").expanduser().absolute()
