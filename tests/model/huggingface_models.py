"""Small models of transformers' with random weights, and their directories on disk."""

import json
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
)

VOCAB_SIZE, CONTEXT = 300, 64
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


def randomised(model: Any) -> Any:
    """Norms and biases too: fresh ones are ones and noughts, which would hide their mixing-up."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.1 + (1.0 if "norm" in name.lower() or ".ln_" in name else 0.0))
    return model.eval()


def saved(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | changes
    settings = {name: value for name, value in settings.items() if value != "REMOVED"}
    path.write_text(json.dumps(settings))
