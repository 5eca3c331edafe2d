"""The bundle that is served when none is named: SmolLM2-135M-Instruct, made on the first start.

Knows: Quill's commands, where the cache is, what this machine would serve.
Does not know: how the commands work. They run as processes of their own: exporting needs torch,
which a server never loads. Only the precision that is going to be served is made.
"""

import signal
import subprocess
import sys
from pathlib import Path

from quill.cache import cache_directory
from quill.export.bundle.manifest import MANIFEST_FILE, Manifest, read_manifest
from quill.export.errors import BundleError
from quill.export.precisions import PRECISIONS
from quill.server.errors import StartError
from quill.server.machine.resources import onnxruntime_version

NAME = "smollm2-135m"  # as `quill import` and `quill export` know it
KNOWN_AS = "SmolLM2-135M-Instruct"


def prepared_bundle(device: str, precision: str | None) -> Path:
    """The same as `default_bundle`, by a process of its own: what it imports isn't needed later."""
    command = [sys.executable, "-m", __name__, device, precision or ""]
    with subprocess.Popen(command) as child:
        try:
            code = child.wait()
        except BaseException:
            child.terminate()  # so that its own child ends, too
            raise
    if code:
        sys.exit(code)
    return _bundle()


def _bundle() -> Path:
    return cache_directory() / "bundles" / NAME


def default_bundle(device: str = "auto", precision: str | None = None) -> Path:
    """The bundle's directory; what it lacks is made first. Shows progress."""
    from quill.server.loading.choices import takes_cuda  # imports ONNX Runtime

    bundle = _bundle()
    if precision is not None and precision not in PRECISIONS:
        raise StartError(f"unknown precision {precision!r}; there are {', '.join(PRECISIONS)}")
    wanted = precision or ("fp16" if takes_cuda(device) else None)
    export = ["export", NAME, "--out", str(bundle)]
    if wanted is not None:
        export += ["--precision", wanted]
    if (bundle / MANIFEST_FILE).exists():
        try:
            manifest = _read(bundle)
        except BundleError as error:
            print(f"{error}\nSo the default model is made anew.", flush=True)
        else:
            _complete(manifest, wanted, export)
            return bundle
    title = f"The first start makes the default model, {KNOWN_AS}, and proves it against PyTorch"
    run_step(f"{title}: once, a minute or two on idle cores.", *export)
    return bundle


def _read(bundle: Path) -> Manifest:
    """BundleError: another version of Quill must have made it."""
    manifest = read_manifest(bundle)
    version = onnxruntime_version()
    if manifest.onnxruntime != version:
        raise BundleError(
            f"{bundle} was verified with ONNX Runtime {manifest.onnxruntime}; this is {version}."
        )
    return manifest


def _complete(manifest: Manifest, wanted: str | None, export: list[str]) -> None:
    """Adds the precision that is going to be served, if it isn't there."""
    from quill.server.loading.choices import best_here

    precision = wanted or best_here(manifest)
    if precision in manifest.precisions:
        return
    try:
        run_step(f"The default model has no {precision} graphs yet: adding them.", *export, "--add")
    except StartError as error:
        if wanted is not None:
            raise
        print(f"{error}\nSo it is served as it is.", flush=True)


def run_step(title: str, *arguments: str) -> None:
    """Runs another command of Quill in a process of its own."""
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


def main() -> None:
    device, precision = sys.argv[1:]
    try:
        default_bundle(device, precision or None)
    except StartError as error:
        sys.exit(f"quill: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
