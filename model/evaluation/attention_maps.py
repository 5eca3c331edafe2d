"""Shows what a trained network looks at: `quill attention`.

Knows: how to record attention weights, which layers and heads to record.
Does not know: how a picture is made (see model/evaluation/attention_picture.py).

A causal model shows its self-attention: which earlier tokens each token looks at. A seq2seq model
shows its encoder-decoder attention: which source tokens it looks at while it writes each token of
the target.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.data.tokenizer import Tokenizer
from quill.model.errors import CheckpointError, RequestError
from quill.model.evaluation.attention_picture import (
    AttentionGrid,
    WeightsArray,
    draw,
    picture_size,
    token_labels,
)
from quill.model.importers.import_weights import open_checkpoint
from quill.model.network.attention import (
    CrossKeyValue,
    UncachedAttention,
    attention_weights,
    causal_mask,
    merge_heads,
    relative_bias,
    repeat_groups,
    split_heads,
    split_qkv,
)
from quill.model.network.config import ModelConfig
from quill.model.network.network import Network
from quill.model.network.positions import RotaryTables, tables_of
from quill.model.network.recurrent import Recurrent
from quill.model.network.transformer import Transformer
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters

# N heads · T queries · S keys · H head size · E = heads x head size

DEFAULT_NUM_LAYERS = 4


def run(args: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(args.checkpoint)
    if checkpoint.config.family == "encoder":
        raise RequestError("attention maps exist for causal and seq2seq models; this is an encoder")
    if checkpoint.config.short_conv is not None:
        raise RequestError("attention maps aren't there for models with short convolutions")
    layers = choose_indices("layer", args.layers, checkpoint.config.num_layers)
    heads = choose_indices("head", args.heads, checkpoint.config.num_heads)
    looks = find_looks(checkpoint, args.text, args.target)
    # Refuses a picture that is too large before the weights are computed.
    picture_size(len(layers), len(heads), len(looks.rows), len(looks.columns))
    weights = record(looks)
    if args.out.suffix.lower() == ".json":
        write_numbers(args.out, looks, [weights[layer][heads] for layer in layers])
        return
    grid = AttentionGrid(
        title=args.text,
        row_caption=looks.row_caption,
        column_caption=looks.column_caption,
        row_labels=token_labels(looks.tokenizer, looks.rows),
        column_labels=token_labels(looks.tokenizer, looks.columns),
        layers=layers,
        heads=heads,
        weights=[weights[layer] for layer in layers],
    )
    draw(grid, args.out)
    num_maps = len(layers) * len(heads)
    print(f"{args.out}: {num_maps} maps of {len(looks.rows)} x {len(looks.columns)} tokens")


def choose_indices(kind: str, given: str | None, number: int) -> list[int]:
    """The layers or heads of "0,5" or "all". None: a few, from first to last."""
    if given == "all":
        return list(range(number))
    if given is None:
        steps = min(number, DEFAULT_NUM_LAYERS)
        return [index * (number - 1) // max(1, steps - 1) for index in range(steps)]
    try:
        chosen = [int(part) for part in given.split(",")]
    except ValueError as error:
        raise RequestError(
            f"{kind}s are {given!r}; write numbers with commas, like 0,5, or all"
        ) from error
    for index in chosen:
        if not 0 <= index < number:
            raise RequestError(
                f"there is no {kind} {index}; the model has {kind}s 0 to {number - 1}"
            )
    return chosen


@dataclass(frozen=True)
class Looks:
    """Who looks at whom: the tokens that label rows and columns, and what the network is fed."""

    model: Network
    tokenizer: Tokenizer
    rows: list[int]
    columns: list[int]
    input_ids: list[int]
    source_ids: list[int] | None = None
    row_caption: str = "the token that looks"
    column_caption: str = "the token looked at"


def find_looks(checkpoint: Checkpoint, text: str, target: str | None) -> Looks:
    if checkpoint.tokenizer is None:
        raise CheckpointError("the checkpoint has no tokenizer, so it can't read a text")
    tokenizer, model = checkpoint.tokenizer, checkpoint.build()
    ids = tokenizer.encode(text)
    if checkpoint.config.family == "seq2seq":
        return _find_cross_looks(checkpoint, tokenizer, model, ids, target)
    if target is not None:
        raise RequestError("a target was given, but only a seq2seq model has a source and a target")
    if checkpoint.prepend_bos and checkpoint.special_tokens.bos is not None:
        ids = [checkpoint.special_tokens.bos, *ids]
    _check_length("text", ids, model)
    return Looks(model, tokenizer, ids, ids, ids)


def _find_cross_looks(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    model: Network,
    ids: list[int],
    target: str | None,
) -> Looks:
    """A row is the token being written, while the decoder has read those before it."""
    bos, eos = checkpoint.special_tokens.bos, checkpoint.special_tokens.eos
    if bos is None or eos is None:
        raise CheckpointError("the checkpoint has no bos or eos token; a seq2seq model needs both")
    source_ids = [*checkpoint.special_tokens.source_start, *ids, eos]
    _check_length("text", source_ids, model)
    if target is None:
        greedy = SamplingParameters(temperature=0.0, stop_ids=frozenset({eos}))
        answer = generate(model, [bos], greedy, source_ids=source_ids, cached=True)
        written = list(answer.token_ids)
    else:
        written = [*tokenizer.encode(target), eos]
        _check_length("target", written, model)
    return Looks(
        model,
        tokenizer,
        rows=written,
        columns=source_ids,
        input_ids=[bos, *written[:-1]],
        source_ids=source_ids,
        row_caption="the token being written",
        column_caption="the source token looked at",
    )


def _check_length(name: str, ids: Sequence[int], model: Network) -> None:
    if not 1 <= len(ids) <= model.config.context:
        raise RequestError(
            f"the {name} has {len(ids)} tokens; the model takes from 1 to {model.config.context}"
        )


def write_numbers(path: Path, looks: Looks, weights: Sequence[WeightsArray]) -> None:
    """The same as numbers, as JSON: of each layer all heads."""
    found = {
        "rows": token_labels(looks.tokenizer, looks.rows),
        "columns": token_labels(looks.tokenizer, looks.columns),
        "weights": [layer.tolist() for layer in weights],
    }
    try:
        path.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"can't write the weights {path}: {error}") from error


@torch.no_grad()
def record(looks: Looks) -> list[WeightsArray]:
    """The weights of each decoder layer, as (N, T, S)."""
    model = looks.model
    ids_1T = torch.tensor([looks.input_ids])
    if isinstance(model, Recurrent):
        return _record_alignment(model, looks, ids_1T)
    assert isinstance(model, Transformer)
    if looks.source_ids is None:
        recording = RecordingAttention(model.config, model.rotary)
        model.hidden(ids_1T, recording)
        return [_without_future(weights_NTT) for weights_NTT in recording.self_weights]
    source_1S = torch.tensor([looks.source_ids])
    cross = model.encode(source_1S, torch.ones_like(source_1S, dtype=torch.bool))
    recording = RecordingAttention(model.config, model.rotary, cross, model.relative("decoder"))
    model.hidden(ids_1T, recording)
    return [weights_NTS.numpy() for weights_NTS in recording.cross_weights]


def _record_alignment(model: Recurrent, looks: Looks, ids_1T: Tensor) -> list[WeightsArray]:
    """One layer with one head, whatever the cells."""
    if model.attention is None:
        raise RequestError(
            "the model's context is fixed: it has the source in one vector and looks at no token"
        )
    source_1S = torch.tensor([looks.source_ids])
    memory = model.cached(model.encode(source_1S, torch.ones_like(source_1S, dtype=torch.bool)))
    model.hidden(ids_1T, memory)
    return [torch.stack(memory.weights, dim=1).numpy()] * model.config.num_layers


def _without_future(weights_NTT: Tensor) -> WeightsArray:
    """NaN where a token can't look, to tell it from a token that looks away."""
    future_TT = causal_mask(*weights_NTT.shape[1:]).isinf()
    return weights_NTT.masked_fill(future_TT, math.nan).numpy()


class RecordingAttention(UncachedAttention):
    """Of one sequence, by the textbook formula; keeps the weights."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTables | None,
        cross: CrossKeyValue | None = None,
        bias_NR: Tensor | None = None,
    ) -> None:
        super().__init__(config, rotary, cross, bias_NR)
        self.self_weights: list[Tensor] = []
        self.cross_weights: list[Tensor] = []

    def self_attention(self, layer: int, qkv_BTE: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        config, num_tokens = self._config, qkv_BTE.shape[1]
        q_BNTH, kv = split_qkv(qkv_BTE, config, tables_of(self._rotary, config, layer), 0)
        k_BNTH, v_BNTH = (repeat_groups(x, config.num_heads) for x in kv)
        mask = causal_mask(num_tokens, num_tokens, config.window_of(layer))
        if self._bias_NR is not None:
            mask = mask + relative_bias(self._bias_NR, num_tokens, num_tokens, config.context)
        cap = config.attention_soft_cap
        weights_BNTT = attention_weights(q_BNTH, k_BNTH, mask, config.scale, cap, sinks_N)
        self.self_weights.append(weights_BNTT[0])
        return merge_heads(weights_BNTT @ v_BNTH)

    def cross_attention(self, layer: int, q_BTE: Tensor) -> Tensor:
        assert self._cross is not None, "a decoder with cross-attention needs an encoded source"
        q_BNTH = split_heads(q_BTE, self._config.head_size)
        k_BNSH, v_BNSH = (
            repeat_groups(x, self._config.num_heads) for x in self._cross.layers[layer]
        )
        weights_BNTS = attention_weights(q_BNTH, k_BNSH, scale=self._config.scale)
        self.cross_weights.append(weights_BNTS[0])
        return merge_heads(weights_BNTS @ v_BNSH)
