"""Plain ONNX Runtime computes with the converted graphs what PyTorch computes."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
import transformers

from quill.export.convert.onnx_directory import DATA_FILE, write_onnx
from quill.export.errors import UnsupportedModelError
from quill.model.checkpoint.checkpoint import Checkpoint
from quill.model.data.tokenizer import SpecialTokens, byte_tokenizer
from quill.model.importers.huggingface_directory import read_huggingface
from quill.model.network.transformer import Transformer
from tests.export.tiny import make_checkpoint
from tests.model.huggingface_models import randomised, saved
from tests.model.seq2seqs import t5
from tests.model.successors import SUCCESSORS
from tests.tiny_networks import ENCODER, GPT, LLAMA, RECURRENT, SEQ2SEQ

TOLERANCE = 2e-5  # of the largest logit
PEERS_PYTHON = Path(__file__).parents[3] / ".venv-peers" / "bin" / "python"
Arrays = dict[str, npt.NDArray[Any]]
NUM_TOKENS = 40
CHUNKS = ((0, 25), (25, 26), (26, NUM_TOKENS))
# Matrices that are only stand-ins while the graph is traced.
WIDE = replace(LLAMA, d_model=128, d_ff=320, head_size=32)


def imported(name: str) -> Callable[[Path], Checkpoint]:
    return lambda path: read_huggingface(saved(SUCCESSORS[name](), path))


DECODERS: dict[str, Callable[[Path], Checkpoint]] = {
    "llama": lambda path: make_checkpoint(WIDE),
    "gpt": lambda path: make_checkpoint(GPT),
    "windows and soft caps": imported("gemma 2"),
    "latent attention, experts and yarn": imported("deepseek-v3 with yarn"),
    "experts that share": imported("qwen2-moe"),
    "sinks, biased experts": imported("gpt-oss"),
    "short convolutions": imported("lfm2 with biases"),
}


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def assert_standard(directory: Path) -> None:
    for path in directory.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}
        assert {each.domain for each in model.opset_import} <= {""}
        assert path.stat().st_size < 200_000  # the weights are beside it
    assert (directory / DATA_FILE).stat().st_size > 0


def run(graph: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
    names = [output.name for output in graph.get_outputs()]
    return dict(zip(names, graph.run(names, feeds), strict=True))


def empty_past(graph: onnxruntime.InferenceSession, batch_size: int) -> Arrays:
    shapes = {each.name: each.shape for each in graph.get_inputs() if "past" in each.name}
    return {
        name: np.zeros([batch_size, shape[1], 0, shape[3]], np.float32)
        for name, shape in shapes.items()
    }


def to_past(outputs: Arrays) -> Arrays:
    presents = {name: value for name, value in outputs.items() if name.startswith("present")}
    return {name.replace("present", "past_key_values"): each for name, each in presents.items()}


def assert_close(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    assert np.abs(expected).max() > 0.5
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()


def ids(checkpoint: Checkpoint, *shape: int) -> npt.NDArray[Any]:
    return np.random.default_rng(3).integers(3, checkpoint.config.vocab_size, shape)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_in_chunks(tmp_path: Path, name: str) -> None:
    checkpoint = DECODERS[name](tmp_path / "in")
    assert write_onnx(tmp_path / "out", checkpoint, None) == "model.onnx"
    assert_standard(tmp_path / "out")
    graph, ids_BT = session(tmp_path / "out/model.onnx"), ids(checkpoint, 2, NUM_TOKENS)
    with torch.inference_mode():
        expected = checkpoint.build()(torch.from_numpy(ids_BT)).numpy()
    past, logits = empty_past(graph, 2), []
    for start, end in CHUNKS:
        feeds = {
            "input_ids": ids_BT[:, start:end],
            "attention_mask": np.ones((2, end), np.int64),
            "position_ids": np.arange(start, end)[None].repeat(2, axis=0),
        }
        outputs = run(graph, feeds | past)
        past = to_past(outputs)
        logits.append(outputs["logits"])
    assert_close(np.concatenate(logits, axis=1), expected)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """A decoder with text, and where it is converted to."""
    checkpoint = make_checkpoint(replace(LLAMA, window=9))
    special = SpecialTokens(bos=0, eos=0)
    checkpoint = replace(checkpoint, tokenizer=byte_tokenizer(), special_tokens=special)
    checkpoint = replace(checkpoint, stop_ids=(0,))
    out = tmp_path_factory.mktemp("onnx") / "windowed"
    write_onnx(out, checkpoint, None)
    return checkpoint, out


def test_padding_before_a_text_changes_nothing(windowed: tuple[Checkpoint, Path]) -> None:
    checkpoint, out = windowed
    graph, ids_BT = session(out / "model.onnx"), ids(checkpoint, 2, NUM_TOKENS)
    mask = np.ones((2, NUM_TOKENS), np.int64)
    mask[1, :13] = 0
    positions = np.stack((np.arange(NUM_TOKENS), (np.arange(NUM_TOKENS) - 13).clip(0)))
    feeds = {"input_ids": ids_BT, "attention_mask": mask, "position_ids": positions}
    found = run(graph, feeds | empty_past(graph, 2))["logits"][1, 13:]
    with torch.inference_mode():
        expected = checkpoint.build()(torch.from_numpy(ids_BT[1:, 13:])).numpy()[0]
    assert_close(found, expected)


def test_an_encoder_with_padding(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(ENCODER)
    write_onnx(tmp_path / "out", checkpoint, None)
    assert_standard(tmp_path / "out")
    graph, ids_BT = session(tmp_path / "out/model.onnx"), ids(checkpoint, 2, 30)
    mask = np.ones((2, 30), np.int64)
    mask[1, 17:] = 0
    feeds = {"input_ids": ids_BT, "attention_mask": mask, "token_type_ids": np.zeros_like(ids_BT)}
    outputs, model = run(graph, feeds), checkpoint.build()
    assert isinstance(model, Transformer)
    with torch.inference_mode():
        hidden = model.hidden_states(torch.from_numpy(ids_BT), torch.from_numpy(mask).bool())
        logits = model.project(hidden)
    for name, expected in (("last_hidden_state", hidden), ("logits", logits)):
        for text, length in enumerate((30, 17)):
            assert_close(outputs[name][text, :length], expected[text, :length].numpy())


def test_an_encoder_with_a_relative_bias_that_classifies(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 272, "max_position_embeddings": 202}
    config = transformers.MPNetConfig(**sizes, pad_token_id=1, num_labels=5)
    theirs = randomised(transformers.MPNetForSequenceClassification(config), 0.3)
    checkpoint = read_huggingface(saved(theirs, tmp_path / "in"))
    write_onnx(tmp_path / "out", checkpoint, None)
    assert_standard(tmp_path / "out")
    graph, ids_BT = session(tmp_path / "out/model.onnx"), ids(checkpoint, 2, 150)
    mask = np.ones((2, 150), np.int64)
    mask[1, 117:] = 0
    outputs = run(graph, {"input_ids": ids_BT, "attention_mask": mask})
    inputs = torch.from_numpy(np.where(mask, ids_BT, 1)), torch.from_numpy(mask)
    with torch.inference_mode():
        expected = theirs(inputs[0], attention_mask=inputs[1]).logits.numpy()
    assert_close(outputs["logits"], expected)


@pytest.mark.parametrize("kind", ["sinusoidal", "t5"])
def test_an_encoder_decoder(tmp_path: Path, kind: str) -> None:
    """The names are optimum's."""
    checkpoint = make_checkpoint(SEQ2SEQ)
    if kind == "t5":
        checkpoint = read_huggingface(saved(t5(), tmp_path / "in"))
    write_onnx(tmp_path / "out", checkpoint, None)
    assert_standard(tmp_path / "out")
    names = ("encoder_model", "decoder_model", "decoder_with_past_model")
    encoder, first, later = (session(tmp_path / f"out/{name}.onnx") for name in names)
    source_BS, ids_BT = ids(checkpoint, 3, 20), ids(checkpoint, 3, 12)
    mask = np.ones((3, 20), np.int64)
    mask[1, 11:] = 0
    model = checkpoint.build()
    with torch.inference_mode():
        cross = model.encode(torch.from_numpy(source_BS), torch.from_numpy(mask).bool())
        expected = model(torch.from_numpy(ids_BT), cross).numpy()
    memory = run(encoder, {"input_ids": source_BS, "attention_mask": mask})["last_hidden_state"]
    feeds = {"encoder_attention_mask": mask, "input_ids": ids_BT[:, :5]}
    outputs = run(first, feeds | {"encoder_hidden_states": memory})
    logits, past = [outputs["logits"]], to_past(outputs)
    for step in range(5, 12):
        outputs = run(later, feeds | {"input_ids": ids_BT[:, step : step + 1]} | past)
        logits.append(outputs["logits"])
        past |= to_past(outputs)
    assert_close(np.concatenate(logits, axis=1), expected)


def test_a_recurrent_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="loops over tokens are Quill's own"):
        write_onnx(tmp_path / "out", make_checkpoint(RECURRENT), None)
    assert not (tmp_path / "out").exists()


GENERATE = """
import sys, onnxruntime_genai as genai
model = genai.Model(sys.argv[1])
options = genai.GeneratorParams(model)
options.set_search_options(max_length=24, do_sample=False)
generator = genai.Generator(model, options)
generator.append_tokens(genai.Tokenizer(model).encode(sys.argv[2]))
while not generator.is_done():
    generator.generate_next_token()
print(*generator.get_sequence(0))
"""


def test_genai_generates_the_same_tokens(windowed: tuple[Checkpoint, Path]) -> None:
    checkpoint, out = windowed
    described = json.loads((out / "genai_config.json").read_text())["model"]
    assert (described["vocab_size"], described["eos_token_id"]) == (272, [0])
    if not PEERS_PYTHON.exists():
        pytest.skip("onnxruntime-genai is in the peers' environment, which isn't there: make peers")
    command = [str(PEERS_PYTHON), "-c", GENERATE, str(out), "Once upon"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert checkpoint.tokenizer is not None
    expected, model = checkpoint.tokenizer.encode("Once upon"), checkpoint.build()
    with torch.inference_mode():
        while len(expected) < 24 and expected[-1] != 0:
            expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    # It leaves out the token that ends the answer.
    assert [int(token) for token in printed.split()] == [each for each in expected if each != 0]
