"""Writes a directory of ONNX graphs with standard operators, and what beside them others read.

Knows: the directory's files, onnxruntime-genai's settings. Does not know: the graphs' inputs and
outputs (export/convert/standard_graphs.py), how they are traced.
"""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from quill.export.convert.huggingface import write_settings
from quill.export.convert.huggingface_settings import find_architectures
from quill.export.convert.standard_graphs import (
    IDS,
    LOGITS,
    MASK,
    PAST,
    POSITIONS,
    PRESENT,
    graphs,
)
from quill.export.convert.standard_layers import flatten_products, use_standard_layers
from quill.export.convert.text_files import generation_config, write_json, write_text_files
from quill.export.errors import UnsupportedModelError
from quill.export.graph.prepare import Networks
from quill.export.graph.trace import trace
from quill.export.graph.weights_file import weights_file
from quill.model.checkpoint.atomic import atomic_directory
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.network.transformer import Transformer
from quill.model.progress import Display, track

DATA_FILE = "model.onnx.data"
GENAI_FILE = "genai_config.json"


def write_onnx(out: Path, checkpoint: Checkpoint, preferred: str | None) -> str:
    """Graphs are traced without weights, which are written one by one. Returns their names."""
    config = checkpoint.config
    if config.recurrence is not None:
        raise UnsupportedModelError(
            "a recurrent network can't be converted to ONNX's standard operators: its loops over "
            "tokens are Quill's own. Serve it with Quill: quill serve SOURCE"
        )
    with atomic_directory(out) as directory:
        model, stand_ins = Networks(checkpoint, directory).standard(use_standard_layers)
        assert isinstance(model, Transformer)
        flatten_products(model.head)
        found = graphs(model)
        with weights_file(directory / DATA_FILE, stand_ins) as weights:
            for name, graph in found.items():
                with Display(f"Tracing {name}", None, transient=True):
                    traced = trace(graph)
                weights.take(traced, partial(track, title=f"Writing {name}"))
                ir.save(traced, directory / name)
        for name in found:
            onnx.checker.check_model(directory / name, full_check=True)
        write_text_files(directory, checkpoint)
        for architecture in islice(find_architectures(config, preferred), 1):
            write_settings(directory, checkpoint, architecture)
        if config.family == "causal" and config.short_conv is None:  # one shape for all layers
            write_json(directory / GENAI_FILE, _genai_config(checkpoint))
    return ", ".join(found)


def _genai_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config, special = checkpoint.config, checkpoint.special_tokens
    num_kv_heads, head_size, _ = config.cached
    past, present = (name.format("%d") for name in (PAST, PRESENT))
    eos = list(checkpoint.stop_ids) or [special.eos or 0]
    generation = generation_config(checkpoint)
    known = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
    return {
        "model": {
            "type": "decoder",
            "vocab_size": config.vocab_size,
            "context_length": config.context,
            "bos_token_id": special.bos if special.bos is not None else eos[0],
            "eos_token_id": eos,
            "pad_token_id": special.pad if special.pad is not None else eos[0],
            "decoder": {
                "filename": "model.onnx",
                "session_options": {"provider_options": []},
                "hidden_size": config.d_model,
                "head_size": head_size,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": num_kv_heads,
                "num_hidden_layers": config.num_layers,
                "inputs": {
                    **{name: name for name in (IDS, MASK, POSITIONS)},
                    "past_key_names": f"{past}.key",
                    "past_value_names": f"{past}.value",
                },
                "outputs": {
                    LOGITS: LOGITS,
                    "present_key_names": f"{present}.key",
                    "present_value_names": f"{present}.value",
                },
            },
        },
        "search": {
            "max_length": config.context,
            "past_present_share_buffer": False,  # Attention appends to the past
            **{name: generation[name] for name in known if name in generation},
        },
    }
