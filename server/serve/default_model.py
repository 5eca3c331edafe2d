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
from quill.export.operators.library import operators_are_fast, operators_problem
from quill.export.precisions import PRECISIONS, preferred
from quill.server.errors import StartError
from quill.server.runtime.onnx_session import cuda_problem
from quill.server.serve.subcommand import run_step

NAME = "smollm2-135m"  # as `quill import` and `quill export` know it


def default_bundle(device: str = "auto", precision: str | None = None) -> Path:
    """The bundle's directory; what it lacks is made first. Shows progress."""
    bundle = cache_directory() / "bundles" / NAME
    asked = precision or ("fp16" if _takes_cuda(device) else None)
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
    run_step(f"The first start makes the default model, {NAME}: a minute or two.", *export)
    return bundle


def _takes_cuda(device: str) -> bool:
    return device == "cuda" or (device == "auto" and cuda_problem() is None)


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
    wanted = asked or _best_here(manifest)
    if wanted in manifest.precisions:
        return
    try:
        run_step(f"The default model has no {wanted} graphs yet: adding them.", *export, "--add")
    except StartError as error:
        if asked is not None:
            raise
        print(f"{error}\nSo it is served as it is.", flush=True)


def _best_here(manifest: Manifest) -> str:
    """What this machine would serve, but for what was tried and wasn't good enough."""
    has_operators = operators_problem() is None
    return next(
        name
        for name in preferred(manifest.family, fast_operators=operators_are_fast())
        if name not in manifest.left_out
        if has_operators or not PRECISIONS[name].needs_operators
    )
