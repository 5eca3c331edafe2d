"""What several tests of this room share: bundles, each exported once a run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quill.model.data.tokenizer import ENCODER_SPECIAL_TOKENS, byte_tokenizer
from tests.export.tiny import Exported, export, make_checkpoint, quantized_at_source
from tests.operators import OWN
from tests.tiny_networks import ENCODER, GPT, LLAMA, SEQ2SEQ


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """These networks are too small to share out, and on a busy machine threads wait for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Something to measure perplexity on, without any corpus."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 50, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Exported:
    """The Llama shape, quantized at its source, in all precisions that such a model has."""
    out = tmp_path_factory.mktemp("bundles") / "llama"
    checkpoint = quantized_at_source(make_checkpoint(LLAMA))
    return export(out, checkpoint, "fp32", *OWN, "fp16", text=text)


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The GPT shape with weights in full precision, and no tokenizer."""
    out = tmp_path_factory.mktemp("bundles") / "gpt"
    return export(out, make_checkpoint(GPT), "fp32", *OWN, "fp16")


@pytest.fixture(scope="session")
def seq2seq(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    out = tmp_path_factory.mktemp("bundles") / "seq2seq"
    return export(out, make_checkpoint(SEQ2SEQ), "fp32", *OWN)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Exported:
    """BERT's shape, with its special tokens around every text."""
    out = tmp_path_factory.mktemp("bundles") / "encoder"
    tokenizer = byte_tokenizer(ENCODER_SPECIAL_TOKENS)
    checkpoint = replace(
        make_checkpoint(ENCODER),
        tokenizer=tokenizer,
        special_tokens=tokenizer.special,
        prepend_bos=True,
        append_eos=True,
    )
    return export(out, checkpoint, "fp32", *OWN, text=text)


@pytest.fixture(params=["llama", "gpt", "seq2seq"])
def exported(request: pytest.FixtureRequest) -> Exported:
    """Each family and shape in turn."""
    bundle: Exported = request.getfixturevalue(request.param)
    return bundle
