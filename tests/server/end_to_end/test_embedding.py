"""Embed and FillMask over the wire, on real graphs: PyTorch's vectors, alone and batched."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch

from quill.model.network.attention import EncoderAttention
from quill.model.network.transformer import Transformer
from quill.protos import generation_pb2 as pb
from quill.server.client.errors import CallError
from quill.server.client.sync_client import Client
from tests.server.running import served_bundle
from tests.server.tiny_bundle import CONTEXT, TinyBundle


@pytest.fixture(scope="module")
def encoder(tiny_encoder: TinyBundle) -> Iterator[Client]:
    with served_bundle(tiny_encoder.directory) as client:
        yield client


@pytest.fixture(scope="module")
def causal(tiny_bundle: TinyBundle) -> Iterator[Client]:
    with served_bundle(tiny_bundle.directory) as client:
        yield client


def texts(rng: random.Random, number: int, longest: int = CONTEXT) -> list[list[int]]:
    return [[rng.randrange(512) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def vectors(response: pb.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in response.embeddings]


def of_torch(bundle: TinyBundle, ids: list[int]) -> torch.Tensor:
    """All hidden states of a text."""
    model, ids_1T = bundle.model, torch.tensor([ids])
    assert isinstance(model, Transformer)
    with torch.no_grad():
        if bundle.manifest.family == "causal":
            return model.hidden(ids_1T, model.uncached())[0]
        return model.memory(ids_1T, EncoderAttention(model.config, model.rotary, None))[0]


@pytest.mark.parametrize("family", ["encoder", "causal"])
def test_vectors_are_pytorchs(
    family: str, tiny_encoder: TinyBundle, tiny_bundle: TinyBundle, request: pytest.FixtureRequest
) -> None:
    client: Client = request.getfixturevalue(family)
    bundle = tiny_encoder if family == "encoder" else tiny_bundle
    inputs = texts(random.Random(3), 12)
    expected = [of_torch(bundle, ids).numpy() for ids in inputs]
    pooled = {
        "mean": [hidden_TD.mean(axis=0) for hidden_TD in expected],
        "first": [hidden_TD[0] for hidden_TD in expected],
        "last": [hidden_TD[-1] for hidden_TD in expected],
    }
    for pooling, wanted in pooled.items():
        response = client.embed(inputs, pooling=pooling)
        assert [each.num_tokens for each in response.embeddings] == list(map(len, inputs))
        np.testing.assert_allclose(np.array(vectors(response)), np.array(wanted), atol=2e-3)


@pytest.mark.parametrize("family", ["encoder", "causal"])
@pytest.mark.parametrize("precision", ["fp32", "quill8"])
def test_batch_of_any_lengths_has_each_embedding_to_the_last_bit(
    family: str, precision: str, tiny_encoder: TinyBundle, tiny_bundle: TinyBundle
) -> None:
    rng = random.Random(5)
    calls = [texts(rng, rng.randint(1, 40)) for _ in range(8)]
    prompts = [[rng.randrange(512) for _ in range(20)] for _ in range(4)]
    bundle = tiny_encoder if family == "encoder" else tiny_bundle
    with served_bundle(bundle.directory, precision) as client, ThreadPoolExecutor(12) as pool:
        # Generations run beside, if the model generates.
        streams = [
            pool.submit(client.generate, prompt, max_new_tokens=60, seed=1, temperature=1.0)
            for prompt in prompts
            if family == "causal"
        ]
        batched = list(pool.map(client.embed, calls))
        answers = [list(each.result().sequences[0].token_ids) for each in streams]
        for call, response in zip(calls, batched, strict=True):
            alone = [vectors(client.embed([ids]))[0] for ids in call[:10]]
            assert vectors(response)[:10] == alone
            assert vectors(client.embed(call)) == vectors(response)
        for prompt, answer in zip(prompts, answers, strict=False):
            alone_ = client.generate(prompt, max_new_tokens=60, seed=1, temperature=1.0)
            assert list(alone_.sequences[0].token_ids) == answer


def test_text_is_read_with_the_tokens_around_it(encoder: Client) -> None:
    response = encoder.embed(["abc", ""])
    ids = encoder.tokenize("abc")
    assert [each.num_tokens for each in response.embeddings] == [5, 2]
    assert vectors(response)[0] == vectors(encoder.embed([ids]))[0]
    assert (response.usage.prompt_tokens, response.usage.generated_tokens) == (7, 0)
    assert response.model == encoder.model().name
    assert response.request_id
    assert response.timings.total_ms > 0


def test_vectors_are_cut_and_then_scaled(encoder: Client) -> None:
    (plain,) = vectors(encoder.embed("hello"))
    (cut,) = vectors(encoder.embed("hello", dimensions=8))
    assert cut == plain[:8]
    (scaled,) = vectors(encoder.embed("hello", dimensions=8, normalize=True))
    length = np.linalg.norm(np.array(cut, np.float64))
    np.testing.assert_allclose(scaled, np.array(cut) / length, rtol=1e-6)


def test_masks_are_filled_as_pytorch_would(encoder: Client, tiny_encoder: TinyBundle) -> None:
    model = encoder.model()
    response = encoder.fill_mask(f"a{model.mask_token}c[CLS]{model.mask_token}", top_k=4)
    ids = [*encoder.tokenize("a")[:-1], model.mask_token_id]
    ids += [*encoder.tokenize("c[CLS]")[1:-1], model.mask_token_id, encoder.tokenize("")[-1]]
    assert [each.position for each in response.masks] == [2, len(ids) - 2], "[CLS] is plain text"
    assert response.masks == encoder.fill_mask(ids, top_k=4).masks
    with torch.no_grad():
        chances_TV = tiny_encoder.model.project(of_torch(tiny_encoder, ids)).softmax(dim=-1)
    for mask in response.masks:
        top = chances_TV[mask.position].topk(4)
        assert [each.token_id for each in mask.candidates] == top.indices.tolist()
        chances = [each.probability for each in mask.candidates]
        np.testing.assert_allclose(chances, top.values.tolist(), rtol=1e-2)


def test_model_says_what_it_can(encoder: Client, causal: Client, tiny_encoder: TinyBundle) -> None:
    model = encoder.model()
    assert (model.family, model.embedding_size) == (pb.FAMILY_ENCODER, 64)
    assert (model.default_pooling, model.default_normalize) == (pb.POOLING_MEAN, False)
    assert model.mask_token_id == tiny_encoder.manifest.special_tokens.mask
    assert model.mask_token == "[MASK]"
    other = causal.model()
    assert (other.embedding_size, other.default_pooling) == (64, pb.POOLING_MEAN)
    assert not other.HasField("mask_token_id")


def test_what_an_encoder_cant_do_is_refused_in_words(encoder: Client, causal: Client) -> None:
    for refused in (
        lambda: encoder.generate("hi"),
        lambda: next(encoder.stream("hi")),
        lambda: encoder.score("hi"),
        lambda: causal.fill_mask([1, 2]),
    ):
        with pytest.raises(CallError) as caught:
            refused()
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert "encoder" in caught.value.reason


def test_translator_doesnt_embed(tiny_translator: TinyBundle) -> None:
    with served_bundle(tiny_translator.directory) as client:
        assert client.model().embedding_size == 0
        with pytest.raises(CallError, match="translation model doesn't embed") as caught:
            client.embed("hi")
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
