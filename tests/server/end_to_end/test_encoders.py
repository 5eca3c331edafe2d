"""Encoders from a directory of transformers' to the graphs that a server runs: the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from quill.export.pipeline import ExportOptions, write_bundle
from quill.export.verify.runner import EncoderRunner
from quill.model.importers.huggingface_directory import read_huggingface
from tests.model.huggingface_models import randomised, saved
from tests.operators import OWN

LENGTHS = (150, 1, 33, 17, 200)


def mpnet(kind: Any) -> Any:
    config = transformers.MPNetConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=202,
        num_labels=3,
    )
    return randomised(kind(config), 0.2)


def test_packed_texts_have_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    theirs = mpnet(transformers.MPNetModel)
    checkpoint = read_huggingface(saved(theirs, tmp_path / "theirs"))
    options = ExportOptions(precisions=("fp32", *OWN), verify=False)
    manifest = write_bundle(tmp_path / "bundle", checkpoint, options)
    texts = [torch.randint(2, 272, (1, length)) for length in LENGTHS]
    for precision in ("fp32", *OWN):
        runner = EncoderRunner(tmp_path / "bundle", manifest.graphs_in(precision), manifest.sizes)
        found = runner.encode([text[0].tolist() for text in texts])
        for text, ours in zip(texts, found, strict=True):
            alone = runner.encode([text[0].tolist()])[0]
            np.testing.assert_array_equal(ours.hidden_TD, alone.hidden_TD)
            if precision == "fp32":
                with torch.inference_mode():
                    expected = theirs(text).last_hidden_state[0].numpy()
                np.testing.assert_allclose(ours.hidden_TD, expected, atol=1e-4)


def test_texts_have_the_classes_of_transformers(tmp_path: Path) -> None:
    """Verified, too: the logits of classes are compared with PyTorch's."""
    theirs = mpnet(transformers.MPNetForSequenceClassification)
    checkpoint = read_huggingface(saved(theirs, tmp_path / "theirs"))
    manifest = write_bundle(tmp_path / "bundle", checkpoint, ExportOptions(precisions=("fp32",)))
    runner = EncoderRunner(tmp_path / "bundle", manifest.graphs_in("fp32"), manifest.sizes)
    texts = [torch.randint(2, 272, (1, length)) for length in LENGTHS]
    found = runner.encode([text[0].tolist() for text in texts], [[0]] * len(texts))
    for text, ours in zip(texts, found, strict=True):
        with torch.inference_mode():
            np.testing.assert_allclose(ours.logits_LV, theirs(text).logits.numpy(), atol=1e-4)
    if OWN:
        options = ExportOptions(precisions=OWN, verify=False)
        manifest = write_bundle(tmp_path / "integers", checkpoint, options)
        runner = EncoderRunner(tmp_path / "integers", manifest.graphs_in("quill8"), manifest.sizes)
        (rounded,) = runner.encode([texts[0][0].tolist()], [[0]])
        np.testing.assert_allclose(rounded.logits_LV, found[0].logits_LV, atol=0.1)
