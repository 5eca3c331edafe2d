"""What came after Llama computes here what it computes in transformers."""

from pathlib import Path

import pytest
import torch

from quill.model.importers.huggingface_directory import read_huggingface
from tests.model.huggingface_models import saved
from tests.model.successors import CONTEXT, SUCCESSORS

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", SUCCESSORS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = SUCCESSORS[name]()
    ours = read_huggingface(saved(theirs, tmp_path)).build()
    ids_BT = torch.randint(0, 272, (2, CONTEXT), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected, found = theirs(ids_BT).logits, ours(ids_BT)
        cached = ours.cached()
        parts = [
            ours.project(ours.hidden(part, cached))
            for part in torch.split(ids_BT, [50, 1, 1, 44], dim=1)
        ]
    assert expected.std() > 0.1
    for each in (found, torch.cat(parts, dim=1)):
        assert float((each - expected).abs().max()) < TOLERANCE
