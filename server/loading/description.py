"""What is served, for frontends: the model's limits, its tokenizer, its chat template.

Knows: the bundle's files beside the graphs. Does not know: the engine, ONNX Runtime.
"""

from dataclasses import dataclass
from pathlib import Path

from quill.export.bundle.manifest import Manifest, check_files
from quill.server.frontend.served_model import ServedModel
from quill.server.grammar.checker import GrammarChecker
from quill.server.request import Limits
from quill.server.settings import Settings
from quill.server.text.chat_template import ChatTemplate
from quill.server.text.tokenizer import Text


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What was loaded, and what was chosen for it. Crosses to frontends in other processes."""

    manifest: Manifest  # that was loaded: the file may have changed since
    precision: str
    limits: Limits
    runtime_version: str
    takes_constraints: bool


def describe(directory: Path, info: EngineInfo, settings: Settings) -> ServedModel:
    """BundleError: the tokenizer's file has changed since the engine was loaded."""
    manifest = info.manifest
    graphs = manifest.graphs_in(info.precision)
    text = _open_text(directory, manifest)
    return ServedModel(
        manifest=manifest,
        graphs=graphs,
        device=graphs.device,
        runtime_version=info.runtime_version,
        deterministic=graphs.is_invariant,
        limits=info.limits,
        max_waiting=settings.max_queue,
        max_message_bytes=settings.max_message_bytes,
        text=text,
        template=_open_template(manifest, text),
        grammars=_open_checker(directory, manifest) if info.takes_constraints else None,
        served_names=settings.served_model_name,
    )


def _open_text(directory: Path, manifest: Manifest) -> Text | None:
    if manifest.tokenizer is None:
        return None
    check_files(directory, manifest, [manifest.tokenizer])
    bos = manifest.special_tokens.bos if manifest.prepend_bos else None
    if manifest.family == "seq2seq":
        bos = manifest.special_tokens.source_bos
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
