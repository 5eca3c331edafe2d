"""The bundle's table of contents: what is in the directory, and what it may be relied upon for.

Knows: the entries of manifest.json, file hashes.
Does not know: torch, ONNX, the network. The server reads bundles through this module, so it
imports only the standard library.
"""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quill.export.bundle.graph_contract import STATE_SIZE
from quill.export.errors import BundleError
from quill.export.precisions import (
    MAX_KL_DIVERGENCE,
    MAX_PERPLEXITY_RATIO,
    Device,
    Family,
    Precision,
)
from quill.json_records import RecordError, from_json

FORMAT_VERSION = 4
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"

CacheType = Literal["float32", "float16"]
Pooling = Literal["mean", "first", "last"]

# Of ASCII, of eight bits, and what else ends a line: they would change how logs and terminals look.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# What a training run and a checkpoint have in the place of a manifest.
NOT_BUNDLES = ("run.json", "config.json")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The network's shape, as far as a server needs it."""

    vocab_size: int
    context: int  # the longest sequence in tokens; for seq2seq on each side
    d_model: int
    num_layers: int  # of the decoder; 0 for an encoder
    num_encoder_layers: int  # 0 for causal
    num_heads: int
    num_kv_heads: int
    head_size: int
    d_ff: int
    num_parameters: int
    num_segments: int = 0  # what a token's segment may be; 0: there are none
    value_size: int = 0  # of values that are narrower than keys; 0: they aren't
    num_classes: int = 0  # of texts, in the place of the vocabulary's logits; 0: there are none
    conv_layers: tuple[int, ...] = ()  # whose blocks have a convolution's inputs, d_model a token

    def cached(self, layer: int) -> tuple[int, int, int]:
        """Heads of a layer's cache, and the sizes of their keys and values."""
        if layer in self.conv_layers:
            return self.d_model // (2 * STATE_SIZE), STATE_SIZE, STATE_SIZE
        return self.num_kv_heads, self.head_size, self.value_size or self.head_size


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids that play a part."""

    bos: int | None
    eos: int | None
    pad: int | None
    unk: int | None
    mask: int | None = None  # stands for a token that the model shall find
    source_bos: int | None = None  # begins what a seq2seq encoder reads; its bos begins the answer


@dataclass(frozen=True, kw_only=True)
class Invariance:
    """Batch invariance: whether a sequence's logits, keys and values are the same bits in every
    batch, and however its prompt is chunked; measured at export."""

    holds: bool
    rows: tuple[int, ...]  # the batch sizes that were compared
    num_cut_tokens: int  # the length of the prompt that was chunked, in mixed steps


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How far the graphs are from PyTorch; measured at export."""

    worst_difference: float  # of any logit, in standard deviations of its position's logits
    greedy_agreement: float  # the share of positions with PyTorch's most likely token
    perplexity: float  # of an encoder: of masked tokens (export/verify/encoder_verifier.py)
    reference_perplexity: float  # PyTorch's, in float32, on the same tokens
    text: str  # where those tokens came from
    num_tokens: int
    step_ms: float  # one decode step of one sequence, or one text, on the exporting machine
    kl_divergence: float | None = None  # in nats, of a position, from PyTorch's; None for encoders
    greedy_length: float | None = None  # tokens that greedy decoding continues as PyTorch would


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """The network in one precision."""

    precision: Precision
    device: Device  # what it is meant for
    decoder: str | None  # None for an encoder
    encoder: str | None  # None for causal
    weights: str  # external data, shared by both graphs
    cache_type: CacheType
    quantization: str | None  # how the weights became small; None if they didn't
    verification: Verification | None  # None: exported with --no-verify
    invariance: Invariance | None
    hidden: bool = False  # whether a causal decoder gives hidden states, too
    one_token_steps: bool = False  # a sequence's tokens go one by one: a state comes before each

    @property
    def is_good(self) -> bool:
        """Whether a server chooses the precision by itself."""
        if self.precision == "fp32":
            return True
        return self.verification is not None and self.quality_problem is None

    @property
    def quality_problem(self) -> str | None:
        """What a server that chooses by itself has against the measured quality."""
        measured = self.verification
        if measured is None or self.precision == "fp32":
            return None
        rise = measured.perplexity / measured.reference_perplexity - 1
        if not rise <= MAX_PERPLEXITY_RATIO - 1:
            return (
                f"its perplexity is {rise:.1%} above PyTorch's, and a server chooses a precision "
                f"by itself up to {MAX_PERPLEXITY_RATIO - 1:.0%}"
            )
        if measured.kl_divergence is not None and not measured.kl_divergence <= MAX_KL_DIVERGENCE:
            return (
                f"its mean KL divergence from PyTorch is {measured.kl_divergence:.3f}, and a "
                f"server chooses a precision by itself up to {MAX_KL_DIVERGENCE}"
            )
        return None

    @property
    def is_invariant(self) -> bool:
        """Whether the graphs are batch-invariant: export measured that, and it held."""
        return self.invariance is not None and self.invariance.holds

    @property
    def file_names(self) -> list[str]:
        return [name for name in (self.decoder, self.encoder, self.weights) if name is not None]


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of the bundle."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything in manifest.json."""

    format_version: int
    name: str
    family: Family
    onnxruntime: str  # the version that the graphs were verified with
    exporter: str | None = None  # a hash of the code that made it; None: it wasn't recorded yet
    sizes: Sizes
    special_tokens: SpecialTokens
    prepend_bos: bool  # whether a text begins with bos
    append_eos: bool = False  # whether a text to embed ends with eos
    stop_ids: tuple[int, ...]  # every token that ends an answer
    chat_template: str | None
    generation: dict[str, int | float]  # the author's sampling defaults
    provenance: dict[str, Any]
    weights_sha256: str | None = None  # the checkpoint's; None: it wasn't recorded yet
    tokenizer: str | None  # None: the model takes token ids only
    graphs: tuple[Graphs, ...]
    files: tuple[File, ...]  # all but manifest.json itself
    left_out: tuple[str, ...] = ()  # precisions that were tried here and weren't good enough
    pooling: Pooling | None = None  # how Embed makes one vector of a text's; None: by their mean
    normalize: bool = False  # whether Embed normalizes embeddings by default

    def graphs_in(self, precision: str) -> Graphs:
        for graphs in self.graphs:
            if graphs.precision == precision:
                return graphs
        raise BundleError(
            f"the bundle {self.name} has no {precision} graphs; it has {', '.join(self.precisions)}"
        )

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(graphs.precision for graphs in self.graphs)

    def files_for(self, graphs: Graphs) -> list[str]:
        """The names of the files that serving these graphs needs."""
        return [*graphs.file_names, *([] if self.tokenizer is None else [self.tokenizer])]

    def cache_bytes_per_token(self, cache_type: CacheType) -> int:
        """Memory for one more token; a seq2seq source takes the same for each token."""
        number_size = 4 if cache_type == "float32" else 2
        layers = [self.sizes.cached(layer) for layer in range(self.sizes.num_layers)]
        return sum(num * (key + value) for num, key, value in layers) * number_size


def write_manifest(directory: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False, allow_nan=False)
    (directory / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """The manifest, sound in itself. The files it names are checked by `check_files`."""
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise BundleError(f"there is no bundle at {directory}: it should be a directory")
    if not path.exists() and any((directory / name).exists() for name in NOT_BUNDLES):
        raise BundleError(
            f"{directory} holds a model that isn't exported. Make a bundle of it first: "
            f"quill export {directory} --out BUNDLE; or serve it as it is: quill serve {directory}"
        )
    if not path.exists():
        raise BundleError(f"{directory} isn't a bundle: it has no {MANIFEST_FILE}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can't be shown
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"can't read {path}: {error}. Export the bundle again") from error
    _check_version(path, value)
    try:
        manifest = from_json(Manifest, value)
    except RecordError as error:
        raise BundleError(f"{path} is damaged: {error}. Export the bundle again") from error
    _check_names(path, manifest)
    _check_numbers(path, manifest)
    return manifest


def _check_version(path: Path, value: object) -> None:
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise BundleError(
            f"{path} has the format version {version!r}; this version of Quill reads "
            f"{FORMAT_VERSION}. Export the bundle again with this version, or use a newer Quill"
        )


def _check_names(path: Path, manifest: Manifest) -> None:
    if _CONTROL.search(manifest.name):
        raise BundleError(
            f"{path} names the bundle {manifest.name!r}; logs show the name, so it must have no "
            "control characters. Change it there"
        )
    names = [file.name for file in manifest.files]
    for name in names:
        path_like = name in ("", ".", "..", MANIFEST_FILE) or "/" in name or "\\" in name
        if path_like or _CONTROL.search(name):
            raise BundleError(f"{path} lists a file named {name!r}; a plain file name is needed")
    if len(set(names)) != len(names):
        raise BundleError(f"{path} lists a file twice")
    if not manifest.graphs or len(set(manifest.precisions)) != len(manifest.graphs):
        raise BundleError(f"{path} has no graphs, or two of the same precision")
    for graphs in manifest.graphs:
        for name in manifest.files_for(graphs):
            if name not in names:
                raise BundleError(f"{path} uses {name} and doesn't list it among its files")
        _check_roles(path, manifest.family, graphs)


def _check_roles(path: Path, family: Family, graphs: Graphs) -> None:
    if (graphs.encoder is None) != (family == "causal"):
        raise BundleError(f"{path}: causal has no encoder, the others have one; {graphs.precision}")
    if (graphs.decoder is None) != (family == "encoder"):
        raise BundleError(
            f"{path}: an encoder has no decoder, the others have one; {graphs.precision}"
        )


def _check_numbers(path: Path, manifest: Manifest) -> None:
    may_be_none = {"num_encoder_layers", "num_segments", "value_size", "num_classes"}
    if manifest.family == "encoder":
        may_be_none = may_be_none - {"num_encoder_layers"} | {"num_layers"}
    sizes = dataclasses.asdict(manifest.sizes)
    conv_layers = sizes.pop("conv_layers")
    if any(not 0 <= layer < manifest.sizes.num_layers for layer in conv_layers):
        raise BundleError(
            f"{path} is damaged: sizes.conv_layers are {list(conv_layers)}. Export the bundle again"
        )
    for name, size in sizes.items():
        if size < (0 if name in may_be_none else 1):
            raise BundleError(f"{path} is damaged: sizes.{name} is {size}. Export the bundle again")
    special = dataclasses.asdict(manifest.special_tokens).values()
    for token in [*manifest.stop_ids, *(token for token in special if token is not None)]:
        if not 0 <= token < manifest.sizes.vocab_size:
            most = manifest.sizes.vocab_size - 1
            raise BundleError(
                f"{path} is damaged: it has a token {token}, and the vocabulary ends at {most}. "
                "Export the bundle again"
            )


def describe_file(directory: Path, name: str) -> File:
    path = directory / name
    return File(name=name, size=path.stat().st_size, sha256=_sha256(path))


def check_files(directory: Path, manifest: Manifest, names: list[str] | None = None) -> None:
    """Refuses a bundle with a file missing or changed. `names`: only these (default: all)."""
    for file in manifest.files:
        if names is None or file.name in names:
            _check_file(directory / file.name, file)


def _check_file(path: Path, file: File) -> None:
    advice = "The bundle is damaged: export or copy it again"
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise BundleError(f"{path} is not a file. {advice}")
        if path.is_symlink() and path.resolve().parent != path.parent.resolve():
            raise BundleError(
                f"{path} is a link to {path.resolve()}, outside of the bundle. Copy the file itself"
            )
        if size != file.size:
            raise BundleError(f"{path} has {size} bytes; it should have {file.size}. {advice}")
        found = _sha256(path)
    except OSError as error:
        raise BundleError(f"can't read {path}: {error.strerror}. {advice}") from error
    if found != file.sha256:
        raise BundleError(
            f"{path} has the SHA-256 {found}; the manifest says {file.sha256}. {advice}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
