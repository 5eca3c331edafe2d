"""The names of the graphs' inputs and outputs, and what each means.

Knows: the contract between export and server. Does not know: how either keeps it.
Imports no package: the server uses it.

Format version 2. T new tokens of all sequences, one sequence after another; S sequences, B blocks
of the longest, L logits; a pool of N blocks with P positions each, K key/value heads, head size H,
which values may have less of (V; by default H):

    decoder   input_ids (T) int64 · positions (T) int64: past_lengths[s] + 0, 1, 2 …
              query_starts (S + 1) int32: where each sequence's new tokens begin; the last is T
              past_lengths (S) int32: how many positions of it are in its blocks before this step
              block_table (S, B) int32: its blocks; beyond its need any number from 0 to N - 1
              logit_indices (L) int64: which of the T tokens need logits; L may be 0
              key_cache_i, value_cache_i: the pool, for each layer i
              -> logits (L, vocab_size) float32 · new_key_cache_i, new_value_cache_i
              of a causal model for the CPU also, if the manifest has `hidden`,
              hidden_indices (M) int64: which of the T tokens need hidden states; M may be 0
              -> hidden (M, D) float32: the last ones, after the final norm
              Bind what is new to the memory of what was: the update is in place.
    decoder   of a seq2seq model, also
              source_lengths (S) int32 · source_table (S, B') int32: the source's blocks, which lie
              in the same pool. They are read and left as they are.
    encoder   source_ids (T) int64 · positions (T) int64 · query_starts (S + 1) int32
              block_table (S, B) int32 · key_cache_i, value_cache_i, of the decoder's layers
              -> new_key_cache_i, new_value_cache_i: many sources in one run, without padding
    encoder   of family encoder, which has no decoder and no caches
              input_ids (T) int64 · positions (T) int64 · query_starts (S + 1) int32
              logit_indices (L) int64: which are masked; L may be 0
              segments (T) int64, only if num_segments > 0
              -> hidden (T, D) float32 · logits (L, vocab_size) float32; where num_classes > 0,
              logits (L, num_classes), and those of a text's first token are the text's

    both      of a recurrent model: the same, with states where keys and values are (h and c after
              each token; a source's first layer has keys for attention and annotations). One new
              token of a sequence in a step: T = S.

    decoder   with short convolutions: a layer that has one keeps each token's inputs of it, D
              numbers, in D / 32 heads of 16: the first half as keys, the others as values.

S and T are at least 1. Any mix is one step: one token of a sequence, a chunk of a prompt, a few.

    CPU       P = 16, key_cache_i (N, K, H, P), value_cache_i (N, K, P, V): 16 keys lie side by
              side, as one vector register multiplies them
    CUDA      P = 256, both (N, P, K, H): what com.microsoft::PagedAttention takes

Batch invariance (measured on the CPU): a token's hidden state, and what is written into the blocks,
are the same bits whatever else is in the step and wherever its prompt is cut.
"""

from quill.export.precisions import Device

INPUT_IDS = "input_ids"
POSITIONS = "positions"
QUERY_STARTS = "query_starts"
PAST_LENGTHS = "past_lengths"
BLOCK_TABLE = "block_table"
LOGIT_INDICES = "logit_indices"
LOGITS = "logits"
HIDDEN_INDICES = "hidden_indices"
HIDDEN = "hidden"
SEGMENTS = "segments"
SOURCE_IDS = "source_ids"
SOURCE_LENGTHS = "source_lengths"
SOURCE_TABLE = "source_table"

BLOCK = 16
STATE_SIZE = 16
CUDA_BLOCK = 256

Shape = tuple[int, int, int]


def block_size(device: Device) -> int:
    """The positions of a block."""
    return BLOCK if device == "cpu" else CUDA_BLOCK


def block_shapes(
    device: Device, num_kv_heads: int, head_size: int, value_size: int = 0
) -> tuple[Shape, Shape]:
    """One block of a layer's keys, and one of its values."""
    value_size = value_size or head_size
    if device == "cpu":
        return (num_kv_heads, head_size, BLOCK), (num_kv_heads, BLOCK, value_size)
    return (CUDA_BLOCK, num_kv_heads, head_size), (CUDA_BLOCK, num_kv_heads, value_size)


def cache_names(num_layers: int) -> list[str]:
    """The caches of all layers, in the graph's order: key 0, value 0, key 1, …"""
    return [f"{kind}_cache_{i}" for i in range(num_layers) for kind in ("key", "value")]


def extended(cache_name: str) -> str:
    """The output that has the memory of this input."""
    return f"new_{cache_name}"
