"""What is served, for frontends: the model's limits, its tokenizer, its chat template.

Knows: the bundle's files beside the graphs. Does not know: the engine, ONNX Runtime.
"""

import hashlib
from pathlib import Path

from quill.export.bundle.manifest import MANIFEST_FILE, Manifest
from quill.server.frontend.served_model import ServedModel
from quill.server.grammar.checker import GrammarChecker
from quill.server.request import Limits
from quill.server.settings import Settings
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text


def manifest_sha256(directory: Path) -> str:
    """Empty if it can't be read, which `read_manifest` reports."""
    try:
        return hashlib.sha256((directory / MANIFEST_FILE).read_bytes()).hexdigest()
    except OSError:
        return ""


def describe(
    directory: Path,
    manifest: Manifest,
    precision: str,
    limits: Limits,
    runtime_version: str,
    takes_constraints: bool,
    settings: Settings,
) -> ServedModel:
    graphs = manifest.graphs_in(precision)
    text = _open_text(directory, manifest)
    return ServedModel(
        manifest=manifest,
        graphs=graphs,
        device=graphs.device,
        runtime_version=runtime_version,
        deterministic=graphs.is_invariant,
        limits=limits,
        max_waiting=settings.max_queue,
        max_message_bytes=settings.max_message_bytes,
        text=text,
        template=_open_template(manifest, text),
        grammars=_open_checker(directory, manifest) if takes_constraints else None,
    )


def _open_text(directory: Path, manifest: Manifest) -> Text | None:
    if manifest.tokenizer is None:
        return None
    bos = manifest.special_tokens.bos if manifest.prepend_bos else None
    # A source, or a text to embed, ends as those did that the model learnt from.
    ends = {"seq2seq": True, "encoder": manifest.append_eos, "causal": False}[manifest.family]
    eos = manifest.special_tokens.eos if ends else None
    return Text.load(directory / manifest.tokenizer, bos, eos)


def _open_checker(directory: Path, manifest: Manifest) -> GrammarChecker | None:
    if manifest.tokenizer is None:
        return None
    path = directory / manifest.tokenizer
    return GrammarChecker(path, manifest.sizes.vocab_size, manifest.stop_ids)


def _open_template(manifest: Manifest, text: Text | None) -> ChatTemplate | None:
    if manifest.chat_template is None or text is None:
        return None
    special = manifest.special_tokens
    parts = {"bos": special.bos, "eos": special.eos, "pad": special.pad, "unk": special.unk}
    names = {f"{part}_token": text.piece(id) for part, id in parts.items() if id is not None}
    return ChatTemplate(manifest.chat_template, names)
