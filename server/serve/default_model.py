"""The bundle that is served when none is named: SmolLM2-135M-Instruct, made on the first start.

Knows: the front door's commands, where the cache is, what this machine would serve.
Does not know: how the commands work. They run as processes of their own: exporting needs torch,
which a server never loads. Only what is going to be served is made; the rest can be added.
"""

from pathlib import Path

import onnxruntime

from quill.cache import cache_directory
from quill.export.bundle.manifest import MANIFEST_FILE, Manifest, read_manifest
from quill.export.errors import BundleError
from quill.export.precisions import PRECISIONS
from quill.server.errors import StartError
from quill.server.loading.choices import best_here, takes_cuda
from quill.server.serve.subcommand import run_step

NAME = "smollm2-135m"  # as `quill import` and `quill export` know it
KNOWN_AS = "SmolLM2-135M-Instruct"


def default_bundle(device: str = "auto", precision: str | None = None) -> Path:
    """The bundle's directory; what it lacks is made first. Shows progress."""
    bundle = cache_directory() / "bundles" / NAME
    if precision is not None and precision not in PRECISIONS:
        raise StartError(f"unknown precision {precision!r}; there are {', '.join(PRECISIONS)}")
    asked = precision or ("fp16" if takes_cuda(device) else None)
    export = ["export", NAME, "--out", str(bundle)]
    if asked is not None:
        export += ["--precision", asked]
    if (bundle / MANIFEST_FILE).exists():
        try:
            manifest = _read(bundle)
        except BundleError as error:
            print(f"{error}\nSo the default model is made anew.", flush=True)
        else:
            _complete(manifest, asked, export)
            return bundle
    told = f"The first start makes the default model, {KNOWN_AS}, and proves it against PyTorch"
    run_step(f"{told}: once, a minute or two on idle cores.", *export)
    return bundle


def _read(bundle: Path) -> Manifest:
    """Refuses what another version of Quill must have made."""
    manifest = read_manifest(bundle)
    if manifest.onnxruntime != onnxruntime.__version__:
        raise BundleError(
            f"{bundle} was verified with ONNX Runtime {manifest.onnxruntime}; this is "
            f"{onnxruntime.__version__}."
        )
    return manifest


def _complete(manifest: Manifest, asked: str | None, export: list[str]) -> None:
    """Adds the precision that is going to be served, if it isn't there."""
    wanted = asked or best_here(manifest)
    if wanted in manifest.precisions:
        return
    try:
        run_step(f"The default model has no {wanted} graphs yet: adding them.", *export, "--add")
    except StartError as error:
        if asked is not None:
            raise
        print(f"{error}\nSo it is served as it is.", flush=True)
