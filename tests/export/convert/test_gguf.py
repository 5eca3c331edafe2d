"""A GGUF file that was imported is written again with the same tensors, bit for bit."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quill.export.convert.gguf_model import write_gguf
from quill.export.convert.huggingface_settings import different
from quill.export.errors import UnsupportedModelError
from quill.model.checkpoint.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from quill.model.checkpoint.quantized_weight import FORMATS, Kind
from quill.model.data.tokenizer import SpecialTokens, train_bpe
from quill.model.importers.gguf_file import GgufFile
from quill.model.importers.gguf_llama import read_gguf
from quill.model.importers.gguf_tokenizer import PRE_TOKENIZERS
from quill.model.importers.huggingface_directory import read_huggingface
from tests.export.tiny import make_checkpoint
from tests.model import conftest as small
from tests.model.huggingface_models import bert, saved
from tests.model.importers.test_gguf_architectures import CASES, written
from tests.model.importers.test_gguf_tokenizer import PIECES, sentencepiece_metadata
from tests.model.successors import made
from tests.random_weights import random_rows
from tests.tiny_networks import LLAMA, SEQ2SEQ, tiny

PEERS_PYTHON = Path(__file__).parents[3] / ".venv-peers" / "bin" / "python"
# Its scale of logits is in the last norm.
CHANGED = {"granite": {"output_norm.weight"}}


def again(path: Path, source: Checkpoint) -> GgufFile:
    write_gguf(path, source, None)
    return GgufFile(path)


def assert_same_tensors(one: GgufFile, other: GgufFile, but: set[str] | None = None) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name in one.tensors.keys() - (but or set()):
        assert one.tensors[name].kind == other.tensors[name].kind, name
        assert one.tensors[name].shape == other.tensors[name].shape, name
        assert np.array_equal(one.rows(name), other.rows(name)), name


@pytest.mark.parametrize("name", CASES)
def test_every_architecture_comes_back(tmp_path: Path, name: str) -> None:
    make, own = CASES[name]
    file = written(tmp_path / "in.gguf", make(), name.split(",")[0], own)
    source = read_gguf(file)
    found = again(tmp_path / "out.gguf", source)
    tables = {each for each in file.tensors if each.startswith("rope_factors")}
    assert_same_tensors(file, found, CHANGED.get(name, set()) | tables)
    # llama.cpp would stretch by it besides the tables.
    assert not tables or not any(each.endswith("scaling.factor") for each in found.metadata.names)
    assert different(read_gguf(found).config, source.config) == []
    ids_BT = torch.randint(0, source.config.vocab_size, (1, 30), generator=torch.Generator())
    with torch.inference_mode():
        difference = read_gguf(found).build()(ids_BT) - source.build()(ids_BT)
    assert float(difference.abs().max()) < 1e-5


WIDTH = 256  # of a block of the K-kinds


def mixed_file(path: Path) -> GgufFile:
    """Each matrix of another kind: also those that Quill joins to one."""
    kinds: dict[str, Kind | str] = {
        "token_embd": "q6_k",
        "output": "q8_0",
        **{"blk.0.attn_q": "q4_k", "blk.0.attn_k": "q5_k", "blk.0.attn_v": "q6_k"},
        **{"blk.0.ffn_gate": "q4_1", "blk.0.ffn_up": "q4_1", "blk.0.ffn_down": "q5_0"},
        **{"blk.0.attn_output": "q5_1", "blk.1.attn_output": "F16", "blk.1.ffn_down": "BF16"},
        **{f"blk.1.attn_{each}": "q4_0" for each in "qkv"},
        **{"blk.1.ffn_gate": "mxfp4", "blk.1.ffn_up": "q5_k"},
    }
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"embedding_length": WIDTH, "feed_forward_length": WIDTH, "attention.head_count": 4}
    for key, value in small.tiny_metadata().items():
        small._add_value(writer, key, value)
    for key, value in sizes.items():
        small._add_value(writer, f"llama.{key}", value)
    for seed, (name, kind) in enumerate(kinds.items()):
        outputs = {"token_embd": small.TINY.vocab_size, "output": small.TINY.vocab_size}
        outputs |= dict.fromkeys([f"blk.{i}.attn_{each}" for i in (0, 1) for each in "kv"], 128)
        num_outputs = outputs.get(name, WIDTH)
        if kind in FORMATS:
            raw = random_rows(kind, num_outputs, WIDTH, seed).raw_Nb
        else:
            values = np.random.default_rng(seed).normal(size=(num_outputs, WIDTH))
            raw = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType[kind])
        of = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=of)
    norms = [f"blk.{i}.{each}_norm" for i in (0, 1) for each in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def test_every_kind_of_integers_comes_back(tmp_path: Path) -> None:
    file = mixed_file(tmp_path / "in.gguf")
    assert_same_tensors(file, again(tmp_path / "out.gguf", read_gguf(file)))
    # Through a checkpoint of Quill's as well.
    save_checkpoint(tmp_path / "checkpoint", read_gguf(file))
    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(file, again(tmp_path / "second.gguf", checkpoint))


def test_the_metadata_comes_back(tmp_path: Path) -> None:
    entries = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eot_token_id": 5}
    metadata = small.tiny_metadata() | entries
    small.write_gguf(tmp_path / "in.gguf", metadata, small.tiny_tensors(), {}, "llama")
    file = GgufFile(tmp_path / "in.gguf")
    found = again(tmp_path / "out.gguf", read_gguf(file)).metadata
    assert {name: found.get(name) for name in file.metadata.names} == {
        name: file.metadata.get(name) for name in file.metadata.names
    }


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_has_its_name(tmp_path: Path, pre: str) -> None:
    metadata = small.tiny_metadata() | {"tokenizer.ggml.pre": pre}
    small.write_gguf(tmp_path / "in.gguf", metadata, small.tiny_tensors(), {}, "llama")
    found = again(tmp_path / "out.gguf", read_gguf(GgufFile(tmp_path / "in.gguf"))).metadata
    assert PRE_TOKENIZERS[found.text("tokenizer.ggml.pre")][:4] == PRE_TOKENIZERS[pre][:4]
    assert found.flag("tokenizer.ggml.add_bos_token") == PRE_TOKENIZERS[pre].prepend_bos


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_comes_back(tmp_path: Path, prefix: bool) -> None:
    own = small.tiny_metadata() | sentencepiece_metadata(add_space_prefix=prefix)
    metadata = {name: value for name, value in own.items() if not name.endswith(("pre", "merges"))}
    tensors = small.tiny_tensors()
    embedding = np.random.default_rng(0).normal(size=(len(PIECES), small.TINY.d_model))
    tensors["token_embd.weight"] = embedding.astype(np.float32)
    small.write_gguf(tmp_path / "in.gguf", metadata, tensors, {}, "llama")
    file = GgufFile(tmp_path / "in.gguf")
    found = again(tmp_path / "out.gguf", read_gguf(file)).metadata
    for name in ("model", "tokens", "add_space_prefix"):
        assert found.get(f"tokenizer.ggml.{name}") == metadata[f"tokenizer.ggml.{name}"]


def llama_checkpoint(**changes: Any) -> Checkpoint:
    tokenizer = train_bpe(["the cat sat on the mat, the dog did not"] * 3, 272)
    special = SpecialTokens(bos=0, eos=0)
    checkpoint = replace(
        make_checkpoint(tiny(300, 64, dropout=0.1)), tokenizer=tokenizer, stop_ids=(0,)
    )
    return replace(checkpoint, special_tokens=special, **changes)


def test_a_network_that_quill_trained_has_more_embeddings_than_tokens(tmp_path: Path) -> None:
    checkpoint = llama_checkpoint()
    found = read_gguf(again(tmp_path / "out.gguf", checkpoint))
    assert different(found.config, checkpoint.config) == []
    assert found.tokenizer is not None
    assert checkpoint.tokenizer is not None
    assert found.tokenizer.encode("the cat") == checkpoint.tokenizer.encode("the cat")


@pytest.mark.parametrize("name", ["Mistral", "SmolLM3", "Qwen2"])
def test_a_hugging_face_model_becomes_a_gguf_file(tmp_path: Path, name: str) -> None:
    theirs = made(name, **({"sliding_window": None} if name == "Mistral" else {}))
    source = read_huggingface(saved(theirs.bfloat16(), tmp_path / "in"))
    tokenizer = train_bpe(["the cat sat on the mat"] * 3, 270)
    found = again(tmp_path / "out.gguf", replace(source, tokenizer=tokenizer))
    ids_BT = torch.randint(0, 272, (1, 30), generator=torch.Generator())
    with torch.inference_mode():
        assert torch.equal(read_gguf(found).build()(ids_BT), source.build()(ids_BT))


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (make_checkpoint(LLAMA), "has no tokenizer"),
        (make_checkpoint(SEQ2SEQ), "no GGUF architecture"),
        (llama_checkpoint(config=replace(tiny(300, 64), logit_soft_cap=2.0)), "no GGUF architec"),
    ],
)
def test_what_gguf_does_not_have_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        write_gguf(tmp_path / "out.gguf", checkpoint, None)
    assert not list(tmp_path.iterdir())


def test_settings_that_the_file_cannot_tell_are_refused(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    theirs = made("Qwen2", **windows, layer_types=["sliding_attention"] * 2)
    source = read_huggingface(saved(theirs, tmp_path / "in"))
    tokenizer = train_bpe(["the cat sat on the mat"] * 3, 270)
    with pytest.raises(UnsupportedModelError, match="can't tell its window"):
        write_gguf(tmp_path / "out.gguf", replace(source, tokenizer=tokenizer), None)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    source = read_huggingface(saved(bert(), tmp_path / "in"))
    with pytest.raises(UnsupportedModelError, match="no GGUF architecture"):
        write_gguf(tmp_path / "out.gguf", source, "BertForMaskedLM")


LOAD = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False, logits_all=True)
model.eval([5, 6, 7, 8])
print(*model.scores[3].tolist())
"""


def test_llama_cpp_opens_the_file(tmp_path: Path) -> None:
    if not PEERS_PYTHON.exists():
        pytest.skip("llama.cpp is in the peers' environment, which isn't there: make peers")
    checkpoint = llama_checkpoint()
    write_gguf(tmp_path / "out.gguf", checkpoint, None)
    command = [str(PEERS_PYTHON), "-c", LOAD, str(tmp_path / "out.gguf")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with torch.inference_mode():
        ours_V = checkpoint.build()(torch.tensor([[5, 6, 7, 8]]))[0, -1]
    theirs_V = torch.tensor([float(each) for each in printed.split()])
    assert torch.allclose(ours_V, theirs_V, atol=0.02 * float(ours_V.abs().max()))
