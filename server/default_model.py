"""The bundle that is served when none is named: SmolLM2-135M, made on the first start.

Knows: the front door's commands, where the cache is. Does not know: how they work.
They run as processes of their own: importing and exporting need torch, which a server never loads.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import onnxruntime

from export.errors import BundleError
from export.manifest import MANIFEST_FILE, read_manifest
from server.errors import StartError

NAME = "smollm2-135m"


def cache_directory() -> Path:
    """As model/fetch.py, which the server may not import."""
    return Path(os.environ.get("QUILL_CACHE") or "~/.cache/quill").expanduser().absolute()


def default_bundle() -> Path:
    """The bundle's directory; it is made first if it isn't there or is outdated. Shows progress."""
    bundle = cache_directory() / "bundles" / NAME
    if (bundle / MANIFEST_FILE).exists():
        problem = _problem(bundle)
        if problem is None:
            return bundle
        print(f"{problem}\nSo the default model is made anew.", flush=True)
    print(f"The first start makes the default model, {NAME}. It takes a few minutes.", flush=True)
    checkpoint = cache_directory() / "checkpoints" / NAME
    run_step("[1/2] fetching and importing", "import", NAME)
    run_step("[2/2] exporting", "export", str(checkpoint), "--out", str(bundle))
    return bundle


def _problem(bundle: Path) -> str | None:
    """Why another version of Quill must have made this bundle."""
    try:
        version = read_manifest(bundle).onnxruntime
    except BundleError as error:
        return str(error)
    if version != onnxruntime.__version__:
        return (
            f"{bundle} was verified with ONNX Runtime {version}; this is {onnxruntime.__version__}."
        )
    return None


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
