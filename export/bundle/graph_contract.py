"""The names of the graphs' inputs and outputs, and what each means.

Knows: the contract between export and server. Does not know: how either keeps it.
Imports nothing: the server uses it.

Format version 1. R rows, T new tokens, L logits, C capacity, S source:

    decoder   input_ids (R, T) int64 · seqlens_k (R) int32: a row's length after this step, less 1
              total_sequence_length () int32: the longest row's length after this step, on the CPU
              logit_indices (L) int64: where logits are wanted, as row * T + token
              past_key_i, past_value_i (R, kv_heads, C, head_size), for each layer i
              -> logits (L, vocab_size) float32 · present_key_i, present_value_i as the past
              T > 1 only with R = 1. Bind present to the memory of past: the update is in place.
    decoder   of a seq2seq model has T = 1, and also
              source_seqlens_k (R) int32: the source's length, less 1
              source_total_length () int32: the longest source's length, on the CPU
              past_cross_key_i, past_cross_value_i -> present_cross_key_i, present_cross_value_i:
              what the encoder parked; bound to the same memory too, and left as it is
    encoder   source_ids (1, S capacity) int64, padded with anything
              source_positions (S) int64: 0, 1, 2 … for the real tokens
              -> present_cross_key_i, present_cross_value_i (1, kv_heads, S capacity, head_size)

Batch invariance: a row's logits don't depend on what else is in the batch, and prefill not on where
it is cut, as long as no chunk leaves a token alone in a kernel's tile: no chunk's length is 1 more
than a multiple of the manifest's `tile`. Where its `min_rows` is 2, the same goes for the
numbers of rows and of logits.
"""

from typing import Literal

INPUT_IDS = "input_ids"
SEQLENS_K = "seqlens_k"
TOTAL_LENGTH = "total_sequence_length"
LOGIT_INDICES = "logit_indices"
LOGITS = "logits"
SOURCE_IDS = "source_ids"
SOURCE_POSITIONS = "source_positions"
SOURCE_SEQLENS_K = "source_seqlens_k"
SOURCE_TOTAL_LENGTH = "source_total_length"

Side = Literal["past", "present"]


def cache_names(side: Side, num_layers: int, cross: bool = False) -> list[str]:
    """The caches of all layers, in the graph's order: key 0, value 0, key 1, …"""
    middle = "cross_" if cross else ""
    return [f"{side}_{middle}{kind}_{i}" for i in range(num_layers) for kind in ("key", "value")]
