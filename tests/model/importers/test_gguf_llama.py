"""A Llama out of a GGUF file computes what transformers computes with the same file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.errors import CheckpointError, ConfigError, UnsupportedError
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.network.presets import preset
from tests.model.conftest import TINY, Array, MakeGguf, tiny_tensors

TOLERANCE = 1e-4
PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is 12345 + 678?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Ünïcödé, 日本語 and 🦜: " + "on and on " * 30,
)


def empty_reference(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def filled(model: LlamaForCausalLM, tensors: dict[str, Tensor]) -> LlamaForCausalLM:
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def tiny_reference(path: Path, **changes: Any) -> LlamaForCausalLM:
    """All done by transformers: reading, dequantizing, un-permuting, naming."""
    settings = {
        "vocab_size": TINY.vocab_size,
        "hidden_size": TINY.d_model,
        "intermediate_size": TINY.d_ff,
        "num_hidden_layers": TINY.num_layers,
        "num_attention_heads": TINY.num_heads,
        "num_key_value_heads": TINY.num_kv_heads,
        "max_position_embeddings": TINY.context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    model = empty_reference(LlamaConfig(**(settings | changes)))
    return filled(model, load_gguf_checkpoint(path, True, model_to_load=model)["tensors"])


def logits_difference(checkpoint: Checkpoint, reference: LlamaForCausalLM, ids: list[int]) -> float:
    ids_BT = torch.tensor([ids])
    with torch.inference_mode():
        ours, theirs = checkpoint.build()(ids_BT), reference(ids_BT).logits
    assert theirs.abs().max() > 0.5
    return float((ours - theirs).abs().max())


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_gguf: Path) -> LlamaForCausalLM:
    """Dequantized and named by gguf, un-permuted by transformers.

    Its own loader does the same but spends 20 s on reading the header and on naming.
    """
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    model = empty_reference(config)
    file, names = GgufFile(smollm2_gguf), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    processor = LlamaTensorProcessor(config=heads)
    tensors = {}
    for name, empty in model.state_dict().items():
        source = names.get_name(name, try_suffixes=(".weight",))
        if source in file.tensors:
            values = gguf.dequantize(file.rows(source), file.tensors[source].kind)
            weights = processor.process(values, source).weights
            tensors[name] = torch.from_numpy(weights.reshape(empty.shape).copy())
    return filled(model, tensors)


def test_smollm2_computes_the_logits_of_transformers(
    smollm2: Checkpoint, smollm2_reference: LlamaForCausalLM
) -> None:
    assert smollm2.tokenizer is not None
    for prompt in PROMPTS:
        ids = smollm2.tokenizer.encode(prompt, parse_special=True)
        assert logits_difference(smollm2, smollm2_reference, ids) < TOLERANCE


def test_smollm2_has_the_shape_of_its_preset(smollm2: Checkpoint) -> None:
    assert smollm2.config == preset("llama-smollm2-135m")
    assert sum(weight.numel() for weight in smollm2.weights.values()) == 134_515_008


def test_smollm2_carries_its_quantized_values_bit_for_bit(smollm2: Checkpoint) -> None:
    kinds = [weight.kind for weight in smollm2.quantized.values()]
    assert (kinds.count("q4_1"), kinds.count("q8_0")) == (120, 1)
    assert smollm2.quantized["embedding.weight"].kind == "q8_0"
    for name, weight in smollm2.quantized.items():
        assert torch.equal(weight.dequantize(), smollm2.weights[name]), name


def test_smollm2_knows_how_to_chat_where_to_stop_and_whence_it_came(smollm2: Checkpoint) -> None:
    assert smollm2.chat_template is not None
    assert "<|im_start|>assistant" in smollm2.chat_template
    assert (smollm2.special_tokens.bos, smollm2.special_tokens.eos) == (1, 2)
    assert smollm2.stop_ids == (0, 2)
    assert not smollm2.prepend_bos
    assert smollm2.provenance["licence"] == "apache-2.0"


def test_a_small_llama_computes_the_logits_of_transformers(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    ids = list(range(0, 100, 3))
    assert logits_difference(read_gguf(GgufFile(path)), tiny_reference(path), ids) < TOLERANCE


def test_an_untied_output_matrix_is_used(make_gguf: MakeGguf) -> None:
    output = tiny_tensors(seed=1)["token_embd.weight"]
    path = make_gguf(tensors={"output.weight": output})
    checkpoint = read_gguf(GgufFile(path))
    assert not checkpoint.config.tied_embeddings
    reference = tiny_reference(path, tie_word_embeddings=False)
    assert logits_difference(checkpoint, reference, list(range(40))) < TOLERANCE


def test_an_output_matrix_equal_to_the_embedding_is_tied(make_gguf: MakeGguf) -> None:
    output = tiny_tensors()["token_embd.weight"]
    checkpoint = read_gguf(GgufFile(make_gguf(tensors={"output.weight": output})))
    assert checkpoint.config.tied_embeddings
    assert "projection.weight" not in checkpoint.weights


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4.0),
        ({"scaling.factor": 4.0}, 4.0),
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "none", "scale_linear": 4.0}, None),
    ],
)
def test_a_factor_stretches_unless_the_type_is_none_as_in_llama_cpp(
    make_gguf: MakeGguf, scaling: dict[str, Any], factor: float | None
) -> None:
    path = make_gguf({f"llama.rope.{name}": value for name, value in scaling.items()})
    found = read_gguf(GgufFile(path)).config.rotary_scaling
    assert (None if found is None else found.factor) == factor


def test_linear_rotary_scaling_is_read(make_gguf: MakeGguf) -> None:
    path = make_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    reference = tiny_reference(path, rope_parameters=rope)
    assert logits_difference(read_gguf(GgufFile(path)), reference, list(range(90))) < TOLERANCE


def llama3_factors(factor: float, base: float) -> Array:
    """As llama.cpp's converter writes them: the published formula, frequency by frequency."""
    factors = []
    for index in range(TINY.head_size // 2):
        wavelength = 2 * np.pi * base ** (2 * index / TINY.head_size)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama_3s_rotary_factors_are_recognized(make_gguf: MakeGguf) -> None:
    factors = llama3_factors(8.0, 500_000.0)
    assert len(set(factors.tolist())) > 2
    tensors = {"rope_freqs.weight": factors}
    path = make_gguf({"llama.rope.freq_base": 500_000.0}, tensors)
    checkpoint = read_gguf(GgufFile(path.rename(path.with_name("llama3.gguf"))))
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    plain = make_gguf({"llama.rope.freq_base": 500_000.0})
    reference = tiny_reference(plain, rope_parameters=rope)
    assert logits_difference(checkpoint, reference, list(range(100))) < TOLERANCE


def test_other_rotary_factors_are_refused(make_gguf: MakeGguf) -> None:
    factors = np.linspace(1, 8, TINY.head_size // 2, dtype=np.float32)
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        read_gguf(GgufFile(make_gguf(tensors={"rope_freqs.weight": factors})))
    twice = make_gguf({"llama.rope.scaling.factor": 2.0}, {"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight and by the factor 2; Quill"):
        read_gguf(GgufFile(twice))


def test_fused_parts_are_carried_in_their_kinds_unless_one_is_in_full_precision(
    make_gguf: MakeGguf,
) -> None:
    kinds = {f"blk.0.attn_{name}.weight": Kind.Q4_1 for name in "qkv"}
    kinds |= {"blk.1.attn_q.weight": Kind.Q4_0, "blk.1.attn_k.weight": Kind.Q8_0}
    kinds |= {"blk.0.ffn_down.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.F16}
    kinds |= {"blk.0.ffn_gate.weight": Kind.Q5_0, "blk.0.ffn_up.weight": Kind.Q8_0}
    checkpoint = read_gguf(GgufFile(make_gguf(kinds=kinds)))
    assert {name: weight.kind for name, weight in checkpoint.quantized.items()} == {
        "decoder.0.attention.qkv.weight": "q4_1",
        "decoder.0.feed_forward.down.weight": "q8_0",
        "decoder.0.feed_forward.up.weight": f"q5_0:{TINY.d_ff},q8_0:{TINY.d_ff}",
    }
    for name, weight in checkpoint.quantized.items():
        assert torch.equal(weight.dequantize(), checkpoint.weights[name])


def test_fused_rows_are_queries_keys_values_un_permuted_and_gate_value(make_gguf: MakeGguf) -> None:
    checkpoint, source = read_gguf(GgufFile(make_gguf())), tiny_tensors()
    up = np.concatenate([source[f"blk.1.ffn_{name}.weight"] for name in ("gate", "up")])
    assert np.array_equal(checkpoint.weights["decoder.1.feed_forward.up.weight"], up)
    qkv = checkpoint.weights["decoder.1.attention.qkv.weight"].numpy()
    query, value = source["blk.1.attn_q.weight"], source["blk.1.attn_v.weight"]
    width, half = len(query), TINY.head_size // 2
    assert np.array_equal(qkv[-len(value) :], value)
    for head in range(TINY.num_heads):
        ours = qkv[:width][head * TINY.head_size : (head + 1) * TINY.head_size]
        theirs = query[head * TINY.head_size : (head + 1) * TINY.head_size]
        assert np.array_equal(ours[:half], theirs[0::2])
        assert np.array_equal(ours[half:], theirs[1::2])


def test_a_setting_that_is_switched_off_is_no_matter(make_gguf: MakeGguf) -> None:
    for metadata in ({"llama.expert_count": 0}, {"llama.attention.causal": True}):
        assert read_gguf(GgufFile(make_gguf(metadata))).config.num_layers == 2


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8, "llama.expert_shared_count": 1}, r"llama\.expert_shared_count"),
        ({"llama.attention.sliding_window": 4096}, r"llama\.attention\.sliding_window"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale"),
        ({"llama.attention.causal": False}, r"attention\.causal false"),
        ({"llama.rope.scaling.type": "dynamic"}, "'dynamic'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"llama.attention.value_length": 8}, "value_length 8"),
        ({"split.count": 3}, "one part of several"),
    ],
)
def test_what_quill_cannot_compute_is_refused(
    make_gguf: MakeGguf, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_gguf(GgufFile(make_gguf(metadata)))
    with pytest.raises(UnsupportedError, match="'mamba'; Quill reads llama, qwen2, "):
        read_gguf(GgufFile(make_gguf(architecture="mamba")))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "'llama.block_count'"),
        ({"llama.block_count": 2**31}, "layers but has"),
        ({"llama.block_count": 3}, "lacks blk.2."),
        ({"llama.feed_forward_length": "wide"}, "must be a whole number"),
        ({"llama.feed_forward_length": 2**20}, "ffn_gate.weight .* has the shape"),
        ({"llama.feed_forward_length": 2**31}, "d_ff is 2147483648"),
        ({"llama.attention.head_count": 8}, "attn_q.weight|attn_k.weight"),
        ({"llama.attention.head_count": 0}, "num_heads is 0"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_errors(
    make_gguf: MakeGguf, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_gguf(GgufFile(make_gguf(metadata)))


def test_a_number_that_is_not_finite_is_refused_by_its_tensors_name(make_gguf: MakeGguf) -> None:
    norm = np.full(TINY.d_model, np.nan, np.float32)
    weights = read_gguf(GgufFile(make_gguf(tensors={"blk.1.ffn_norm.weight": norm}))).weights
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_norm\.weight has a NaN"):
        dict(weights)
    name, down = "blk.1.ffn_down.weight", np.full((TINY.d_model, TINY.d_ff), np.inf, np.float32)
    for kind in (Kind.Q8_0, Kind.F16, Kind.BF16):
        with np.errstate(all="ignore"):
            checkpoint = read_gguf(GgufFile(make_gguf(tensors={name: down}, kinds={name: kind})))
        with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight has a NaN"):
            dict(checkpoint.quantized or checkpoint.weights)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_precision_stays_as_it_is(make_gguf: MakeGguf, kind: str, dtype: torch.dtype) -> None:
    kinds = {name: Kind[kind] for name, array in tiny_tensors().items() if array.ndim > 1}
    weights = read_gguf(GgufFile(make_gguf(kinds=kinds))).weights
    plain = tiny_tensors()["blk.0.ffn_down.weight"]
    down = weights["decoder.0.feed_forward.down.weight"]
    assert torch.equal(down, torch.from_numpy(plain).to(dtype))
    assert weights["decoder_norm.weight"].dtype == torch.float32


def test_missing_misshapen_and_unknown_tensors_are_refused_by_name(make_gguf: MakeGguf) -> None:
    with pytest.raises(CheckpointError, match=r"lacks blk\.1\.attn_v\.weight"):
        read_gguf(GgufFile(make_gguf(tensors={"blk.1.attn_v.weight": None})))
    short = np.zeros((8, TINY.d_model), np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_v\.weight .* \(8, 64\).* \(32, 64\)"):
        read_gguf(GgufFile(make_gguf(tensors={"blk.1.attn_v.weight": short})))
    bias = np.zeros(64, np.float32)
    with pytest.raises(UnsupportedError, match=r"no place for: blk\.0\.attn_q\.bias"):
        read_gguf(GgufFile(make_gguf(tensors={"blk.0.attn_q.bias": bias})))
