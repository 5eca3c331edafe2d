"""External data: each distinct tensor once, under a relative name."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from quill.export.graph.stand_ins import StandIns
from quill.export.graph.weights_file import ALIGNMENT, weights_file


def make_model(**tensors: np.ndarray) -> ir.Model:
    values = []
    for name, array in tensors.items():
        value = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT)
        )
        value.const_value = ir.tensor(array, name=name)
        values.append(value)
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


A, B = np.arange(1000, dtype=np.float32), np.ones((50, 20), np.float32)


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    model = make_model(a=A, b=B)
    with weights_file(tmp_path / "weights.bin", StandIns(tmp_path)) as weights:
        weights.take(model)
    ir.save(model, tmp_path / "model.onnx")
    found = ir.load(tmp_path / "model.onnx").graph.initializers
    for name, array in (("a", A), ("b", B)):
        tensor = found[name].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.location == "weights.bin"
        assert tensor.offset is not None
        assert tensor.offset % ALIGNMENT == 0
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_what_several_graphs_share_is_written_once(tmp_path: Path) -> None:
    with weights_file(tmp_path / "weights.bin", StandIns(tmp_path)) as weights:
        weights.take(make_model(a=A, same=A.reshape(50, 20)))
        weights.take(make_model(another=A.copy()))
    assert (tmp_path / "weights.bin").stat().st_size == A.nbytes


def test_small_tensors_stay_in_the_graph(tmp_path: Path) -> None:
    model = make_model(small=np.zeros(4, np.float32))
    with weights_file(tmp_path / "weights.bin", StandIns(tmp_path)) as weights:
        weights.take(model)
    assert not isinstance(model.graph.initializers["small"].const_value, ir.ExternalTensor)
    assert (tmp_path / "weights.bin").stat().st_size == 0


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"precious")
    with pytest.raises(FileExistsError), weights_file(tmp_path / "weights.bin", StandIns(tmp_path)):
        pass
