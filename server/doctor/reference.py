"""Computes the same tokens by other graphs or kernels, in a process of its own.

    python -m quill.server.doctor.reference BUNDLE PRECISION NUM_TOKENS THREADS > RESULTS.npy

Knows: which kernels the library takes by QUILL_KERNELS. Does not know: what is compared.
Kernels are chosen when the library is loaded, so another choice takes another process.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from quill.server.doctor.probe import Probe, Results
from quill.server.errors import StartError
from quill.server.loading.engine_factory import open_bundle


def compute_elsewhere(
    directory: Path, precision: str, num_tokens: int, num_threads: int, kernels: str = ""
) -> Results:
    """`kernels`: avx2, plain, …; by default those that a server here takes."""
    command = [sys.executable, "-m", __name__, str(directory), precision]
    done = subprocess.run(
        [*command, str(num_tokens), str(num_threads)],
        env=os.environ | ({"QUILL_KERNELS": kernels} if kernels else {}),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"it ended with {done.returncode}"
        raise StartError(f"{precision} can't be computed with {kernels or 'any'} kernels: {reason}")
    found: Results = np.load(io.BytesIO(done.stdout))
    return found


def main() -> None:
    directory, precision, num_tokens, num_threads = sys.argv[1:]
    bundle = open_bundle(Path(directory), precision)
    probe = Probe(bundle, int(num_threads), spinning=False)
    np.save(sys.stdout.buffer, probe.whole(int(num_tokens)))


if __name__ == "__main__":
    main()
