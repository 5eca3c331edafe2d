"""From whatever `quill serve` was given to a bundle: `quill export` makes what isn't in the cache.

Knows: Quill's commands, whether this machine has CUDA. Does not know: how models are fetched,
imported or exported. That runs as a process of its own: it needs torch, which a server never loads.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from quill.export.precisions import PRECISIONS
from quill.model.sources.catalogue import DEFAULT
from quill.model.sources.kinds import find_source
from quill.server.errors import StartError

UNSUPPORTED = 2  # the exit code of `quill export` for a model that has no graphs in a precision


def prepared_bundle(given: str | None, device: str = "auto", precision: str | None = None) -> Path:
    """A bundle's directory is returned as it is. Shows progress."""
    check_precision(precision)
    source = find_source(given or DEFAULT)
    if source.kind == "bundle":
        return source.path
    command = [sys.executable, "-m", __name__, source.given, device, precision or ""]
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                output, _ = child.communicate()
            except BaseException:
                child.terminate()  # it removes what is half written
                raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if child.returncode:
        sys.exit(child.returncode)
    return Path(output.splitlines()[-1])


def check_precision(wanted: str | None) -> None:
    for name in () if wanted is None else wanted.split(","):
        if name not in PRECISIONS:
            raise StartError(f"unknown precision {name!r}; there are {', '.join(PRECISIONS)}")


def main() -> None:
    """Becomes `quill export`, whose only line on stdout is the bundle's directory."""
    given, device, precision = sys.argv[1:]
    from quill.server.loading import choices  # imports ONNX Runtime

    try:
        choices.check_device(device, precision)
    except StartError as error:
        sys.exit(f"quill: {error}")
    command = [sys.executable, "-m", "quill", "export", given]
    if not precision and choices.takes_cuda(device):
        code = subprocess.run([*command, "--precision", "fp16"], check=False).returncode
        if code != UNSUPPORTED or device == "cuda":
            sys.exit(code)
    os.execv(sys.executable, [*command, *(["--precision", precision] if precision else [])])


if __name__ == "__main__":
    main()
