"""What is written for transformers computes there what the source computed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quill.export.convert.huggingface import write_huggingface
from quill.export.convert.huggingface_settings import ONE_WAY
from quill.export.errors import UnsupportedModelError
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.data.tokenizer import SpecialTokens, train_bpe
from quill.model.importers.huggingface_directory import ARCHITECTURES, read_huggingface
from quill.model.network.config import ModelConfig
from quill.model.network.presets import preset
from tests.export.tiny import make_checkpoint
from tests.model.huggingface_models import bert, gpt2, llama, marian, randomised, saved
from tests.model.successors import SIZES, SUCCESSORS, made
from tests.tiny_networks import GPT, RECURRENT, SEQ2SEQ, tiny

TOLERANCE = 1e-5
BERT = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
BERT |= {"num_attention_heads": 3, "max_position_embeddings": 66, "pad_token_id": 1}


def roberta(kind: Any, **changes: Any) -> Any:
    return randomised(kind(kind.config_class(**(BERT | {"type_vocab_size": 1} | changes))))


def distilbert(kind: Any) -> Any:
    sizes = {"vocab_size": 300, "dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 3}
    return randomised(kind(transformers.DistilBertConfig(**sizes)))


MODELS: dict[str, Callable[[], Any]] = {
    **SUCCESSORS,
    "llama": llama,
    "llama 3": lambda: llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "qwen2": lambda: made("Qwen2"),
    "gpt-2": gpt2,
    "marian": marian,
    "bert for masked tokens": bert,
    "bert": lambda: bert(transformers.BertModel),
    "bert for pretraining": lambda: bert(transformers.BertForPreTraining),
    "roberta": lambda: roberta(transformers.RobertaModel),
    "roberta for masked tokens": lambda: roberta(transformers.RobertaForMaskedLM),
    "xlm-roberta": lambda: roberta(transformers.XLMRobertaModel),
    "xlm-roberta for masked tokens": lambda: roberta(transformers.XLMRobertaForMaskedLM),
    "distilbert": lambda: distilbert(transformers.DistilBertModel),
    "distilbert for masked tokens": lambda: distilbert(transformers.DistilBertForMaskedLM),
}


def outputs(model: Any) -> Tensor:
    """Logits, or hidden states where there are none."""
    ids_BT = torch.randint(2, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    answer = {"decoder_input_ids": ids_BT[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        found = model(ids_BT, **answer)
    names = ("logits", "prediction_logits", "last_hidden_state")
    logits: Tensor = next(getattr(found, name) for name in names if hasattr(found, name))
    return logits


def loaded(directory: Path, architecture: str) -> Any:
    kind = getattr(transformers, architecture)
    eager = {"attn_implementation": "eager"} if architecture.startswith("Gemma") else {}
    return kind.from_pretrained(directory, **eager).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    theirs = MODELS[name]()
    source = read_huggingface(saved(theirs, tmp_path / "in"))
    (architecture,) = theirs.config.architectures
    assert write_huggingface(tmp_path / "out", source, architecture) == architecture
    found, expected = outputs(loaded(tmp_path / "out", architecture)), outputs(theirs)
    assert expected.abs().max() > 0.5
    assert float((found - expected).abs().max()) < TOLERANCE
    again = read_huggingface(tmp_path / "out")
    assert again.config == source.config
    for each in source.weights:
        assert torch.equal(again.weights[each], source.weights[each]), each


def test_every_architecture_comes_back() -> None:
    compared = {type(make()).__name__ for make in MODELS.values()}
    assert compared == {*ARCHITECTURES} - ONE_WAY, "Nomic comes from GGUF alone"


def our_outputs(checkpoint: Checkpoint, like: Any) -> Tensor:
    network = checkpoint.build()
    ids_BT = torch.randint(2, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits: Tensor
        if not like.config.is_encoder_decoder:
            logits = network(ids_BT)
            return logits
        cross = network.encode(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool))
        logits = network(ids_BT[:, :7], cross)
        return logits


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (replace(preset("tiny"), vocab_size=272, num_layers=2), "StableLmForCausalLM"),
        (replace(GPT, tied_embeddings=True), "GPT2LMHeadModel"),
        (SEQ2SEQ, "MarianMTModel"),  # with biases of zero
    ],
)
def test_networks_that_quill_trained(
    tmp_path: Path, config: ModelConfig, architecture: str
) -> None:
    special = SpecialTokens(bos=1, eos=2, pad=0)
    checkpoint = replace(make_checkpoint(config), special_tokens=special, stop_ids=(2,))
    assert write_huggingface(tmp_path / "out", checkpoint, None) == architecture
    theirs = loaded(tmp_path / "out", architecture)
    found, expected = outputs(theirs), our_outputs(checkpoint, theirs)
    assert float((found - expected).abs().max()) < TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RECURRENT, "recurrent network (lstm, bahdanau)"),
        (replace(preset("bert-tiny"), vocab_size=272), "The nearest, BertForMaskedLM, has another"),
        (replace(preset("moe-tiny"), vocab_size=272), "layer norms (pre), swiglu, experts"),
    ],
)
def test_what_transformers_does_not_have_is_refused_by_name(
    tmp_path: Path, config: ModelConfig, words: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        write_huggingface(tmp_path / "out", make_checkpoint(config), None)
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_is_only_read_is_refused_by_name(tmp_path: Path) -> None:
    for name in ONE_WAY:
        with pytest.raises(
            UnsupportedModelError, match=f"imports {name}, and can write it with --to onnx"
        ):
            write_huggingface(tmp_path / "out", make_checkpoint(SEQ2SEQ), name)


def test_two_norms_that_the_architecture_has_as_one_must_be_the_same(tmp_path: Path) -> None:
    source = read_huggingface(saved(made("Phi", **SIZES), tmp_path / "in"))
    weights = dict(source.weights)
    weights["decoder.0.feed_forward_residual.norm.weight"] = torch.ones(64)
    with pytest.raises(UnsupportedModelError, match="input_layernorm"):
        write_huggingface(tmp_path / "out", replace(source, weights=weights), None)


def texts_checkpoint(**changes: Any) -> Checkpoint:
    tokenizer = train_bpe(["the cat sat on the mat, the dog did not"] * 3, 272)
    config = tiny(tokenizer.vocab_size, 64)
    checkpoint = replace(
        make_checkpoint(config),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(bos=0, eos=0),
        stop_ids=(0, 5),
        chat_template="{{ messages[0].content }}",
        generation={"temperature": 0.7, "top_k": 40},
        prepend_bos=True,
    )
    return replace(checkpoint, **changes)


def test_the_text_settings_come_back(tmp_path: Path) -> None:
    checkpoint = texts_checkpoint()
    write_huggingface(tmp_path / "out", checkpoint, None)
    again = read_huggingface(tmp_path / "out")
    for name in ("stop_ids", "chat_template", "generation", "prepend_bos", "special_tokens"):
        assert getattr(again, name) == getattr(checkpoint, name), name
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert checkpoint.tokenizer is not None
    encoded = theirs("the cat")
    assert encoded.input_ids == [0, *checkpoint.tokenizer.encode("the cat")]
    assert set(encoded) == {"input_ids", "attention_mask"}  # what the model takes
    message = [{"role": "user", "content": "Hi"}]
    assert theirs.apply_chat_template(message, tokenize=False) == "Hi"


def test_a_greedy_author_stays_greedy(tmp_path: Path) -> None:
    checkpoint = texts_checkpoint(generation={"temperature": 0.0, "max_new_tokens": 9})
    write_huggingface(tmp_path / "out", checkpoint, None)
    assert read_huggingface(tmp_path / "out").generation == checkpoint.generation
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["do_sample"] is False


def test_pooling_comes_back(tmp_path: Path) -> None:
    source = read_huggingface(saved(bert(transformers.BertModel), tmp_path / "in"))
    source = replace(source, pooling="first", normalize=True)
    write_huggingface(tmp_path / "out", source, "BertModel")
    again = read_huggingface(tmp_path / "out")
    assert (again.pooling, again.normalize) == ("first", True)


def test_weights_keep_their_types(tmp_path: Path) -> None:
    source = read_huggingface(saved(llama().bfloat16(), tmp_path / "in"))
    write_huggingface(tmp_path / "out", source, None)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    weights = read_huggingface(tmp_path / "out").weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
