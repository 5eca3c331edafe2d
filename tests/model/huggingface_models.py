"""Small models of transformers' with random weights, their directories and what they search."""

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
)

VOCAB_SIZE, CONTEXT, PAD, EOS = 300, 64, 299, 0
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}


def llama(**changes: Any) -> Any:
    return randomised(LlamaForCausalLM(LlamaConfig(**(SIZES | changes))))


def gpt2(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB_SIZE, "n_positions": CONTEXT, "n_embd": 48, "n_layer": 3}
    return randomised(GPT2LMHeadModel(GPT2Config(**(sizes | {"n_head": 4} | changes))))


def bert(kind: Any = BertForMaskedLM, **changes: Any) -> Any:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return randomised(kind(BertConfig(**(sizes | {"num_attention_heads": 3} | changes))))


def marian(**changes: Any) -> Any:
    """Every weight, norm and bias is random, those of the logits too."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT, "d_model": 48}
    sizes |= {"encoder_layers": 3, "decoder_layers": 2}
    sizes |= {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    sizes |= {"encoder_ffn_dim": 80, "decoder_ffn_dim": 80}
    sizes |= {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    more = {"forced_eos_token_id": None, "activation_function": "swish", "scale_embedding": True}
    model: Any = randomised(MarianMTModel(MarianConfig(**(sizes | more | changes))), 0.2)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(12)
        model.final_logits_bias.copy_(torch.randn(1, VOCAB_SIZE, generator=generator))
        model.final_logits_bias[0, EOS] += 4.0  # so that some answers end
    return model


def randomised(model: Any, std: float = 0.1) -> Any:
    """Norms and biases too: fresh ones are ones and noughts, which would hide their mixing-up."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_positions" in name:  # sines, which no importer reads
                continue
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * std + (1.0 if "norm" in name.lower() or ".ln_" in name else 0.0))
    return model.eval()


def saved(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | changes
    settings = {name: value for name, value in settings.items() if value != "REMOVED"}
    path.write_text(json.dumps(settings))


def their_search(
    theirs: Any, given: Sequence[int], stop_ids: Iterable[int], **options: Any
) -> list[tuple[tuple[int, ...], float]]:
    """What transformers' beam search finds, without padding behind the end, and the scores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = theirs.generate(
            torch.tensor([given]),
            attention_mask=torch.ones(1, len(given), dtype=torch.long),
            do_sample=False,
            eos_token_id=sorted(stop_ids) or None,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    num_before = 1 if theirs.config.is_encoder_decoder else len(given)
    answers = [_until_stop(each[num_before:], stop_ids) for each in output.sequences.tolist()]
    return list(zip(answers, output.sequences_scores.tolist(), strict=True))


def _until_stop(answer: list[int], stop_ids: Iterable[int]) -> tuple[int, ...]:
    ends = [place + 1 for place, token in enumerate(answer) if token in stop_ids]
    return tuple(answer[: ends[0]] if ends else answer)
