"""A Marian model of Hugging Face's becomes a checkpoint that computes and searches the same."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from quill.model.errors import UnsupportedError
from quill.model.importers.huggingface_directory import read_huggingface
from quill.model.reference.beam_search import BeamParameters, beam_search
from quill.model.reference.generate import generate
from quill.model.reference.sampling import SamplingParameters

TOLERANCE = 1e-4
VOCAB_SIZE, CONTEXT, PAD, EOS = 300, 64, 299, 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
    "activation_function": "swish",
    "scale_embedding": True,
}


def marian(**changes: Any) -> Any:
    """Every weight, norm and bias is random, those of the logits too."""
    model = MarianMTModel(MarianConfig(**(SIZES | changes)))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_positions" not in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * 0.2 + (1.0 if "layer_norm" in name else 0.0))
        model.final_logits_bias.copy_(torch.randn(1, VOCAB_SIZE, generator=generator))
        model.final_logits_bias[0, EOS] += 4.0  # so that some answers end
    return model.eval()


def saved(model: Any, directory: Path, **generation: Any) -> Path:
    model.save_pretrained(directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    return directory


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randint(1, PAD, (length - 1,), generator=generator).tolist(), EOS]


def their_search(theirs: Any, source_ids: list[int], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return theirs.generate(
            torch.tensor([source_ids]),
            attention_mask=torch.ones(1, len(source_ids), dtype=torch.long),
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )


def without_padding(answer: list[int]) -> tuple[int, ...]:
    """Without the first token, and what follows the end."""
    text = answer[1:]
    return tuple(text[: text.index(EOS) + 1] if EOS in text else text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "relu"},
        {"activation_function": "gelu", "scale_embedding": False},
    ],
    ids=["swish", "relu", "gelu"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = marian(**changes)
    ours = read_huggingface(saved(theirs, tmp_path)).build()
    source, target = torch.tensor([ids(40, 1)]), torch.tensor([[PAD, *ids(CONTEXT - 1, 2)]])
    with torch.inference_mode():
        expected = theirs(source, decoder_input_ids=target).logits
        found = ours(target, ours.encode(source, torch.ones_like(source, dtype=torch.bool)))
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < TOLERANCE


def test_greedy_and_beam_answers_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = marian()
    checkpoint = read_huggingface(saved(theirs, tmp_path))
    assert checkpoint.special_tokens.bos == PAD
    assert checkpoint.stop_ids == (EOS,)
    assert checkpoint.generation["temperature"] == 0.0, "a translation is greedy by default"
    ours, stop_ids = checkpoint.build(), frozenset(checkpoint.stop_ids)
    greedy = SamplingParameters(temperature=0.0, max_new_tokens=12, stop_ids=stop_ids)
    num_stopped = 0
    for seed, length in enumerate((1, 2, 9, 30)):
        source = ids(length, seed)
        answer = generate(ours, [PAD], greedy, source_ids=source, cached=True)
        expected = their_search(theirs, source, max_new_tokens=12).sequences[0].tolist()
        assert answer.token_ids == without_padding(expected)
        for penalty, early in ((1.0, False), (2.0, True), (0.5, "never")):
            parameters = BeamParameters(
                num_beams=4,
                num_return_sequences=4,
                length_penalty=penalty,
                early_stopping=early,  # type: ignore[arg-type]
                max_new_tokens=12,
                stop_ids=stop_ids,
            )
            found = beam_search(ours, [PAD], parameters, source_ids=source, cached=True)
            output = their_search(
                theirs,
                source,
                max_new_tokens=12,
                num_beams=4,
                num_return_sequences=4,
                length_penalty=penalty,
                early_stopping=early,
            )
            answers = [without_padding(each) for each in output.sequences.tolist()]
            assert [each.token_ids for each in found] == answers
            scores = output.sequences_scores.tolist()
            assert [each.score for each in found] == pytest.approx(scores, abs=TOLERANCE)
            num_stopped += sum(each.finish_reason == "stop" for each in found)
    assert num_stopped > 0


def test_token_that_the_author_bans_is_never_said(tmp_path: Path) -> None:
    theirs = marian()
    free = read_huggingface(saved(theirs, tmp_path))
    source = ids(9, 4)
    greedy = SamplingParameters(temperature=0.0, max_new_tokens=8)
    said = generate(free.build(), [PAD], greedy, source_ids=source).token_ids
    banned = read_huggingface(saved(theirs, tmp_path, bad_words_ids=[[said[0]]]))
    assert said[0] not in generate(banned.build(), [PAD], greedy, source_ids=source).token_ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder_ffn_dim": 40}, "encoder_ffn_dim is 40 and its decoder_ffn_dim is 80"),
        ({"normalize_before": True}, "normalize_before True"),
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings False"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'"),
    ],
)
def test_other_shapes_are_refused_in_words(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    saved(marian(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedError, match=words):
        read_huggingface(tmp_path)


def test_longer_banned_words_are_refused(tmp_path: Path) -> None:
    saved(marian(), tmp_path, bad_words_ids=[[3, 4]])
    with pytest.raises(UnsupportedError, match="single tokens only"):
        read_huggingface(tmp_path)
