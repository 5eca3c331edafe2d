"""Runs another command of ours in a process of its own.

Knows: the front door. Does not know: what the commands do.
"""

import signal
import subprocess
import sys

from quill.server.errors import StartError


def run_step(title: str, *arguments: str) -> None:
    """Another command of ours, in a process of its own."""
    print(title, flush=True)
    # Whoever ends us means our child too: subprocess.run ends it when an exception passes.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = subprocess.run([sys.executable, "-m", "quill", *arguments], check=False).returncode
    finally:
        signal.signal(signal.SIGTERM, before)
    if code != 0:
        raise StartError(
            f"`quill {' '.join(arguments)}` failed with code {code}; see above. Set right what it "
            "names and start again, or serve a bundle of your own: quill serve BUNDLE"
        )
