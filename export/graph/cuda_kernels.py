"""Checks, on a machine without a GPU, that the CUDA provider has a kernel for every node.

Knows: which operators and types that provider registers, as far as Quill's graphs use them.
Does not know: whether the kernels compute the right thing: that takes a GPU.

The table was taken from ONNX Runtime's published list of kernels (docs/OperatorKernels.md, 1.30
development), for opset 23. The runtime can't list them: without a device it doesn't register them.
A node without a kernel would run on the CPU, with copies to and fro at every step.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from quill.export.errors import UnsupportedModelError

MICROSOFT = "com.microsoft"
_ANY = "float16 float int32 int64 bool"
_NUMBERS = "float16 float int32 int64"
_FLOATS = "float16 float"

# operator -> the name of a type in its schema -> the types that have a kernel
KERNELS: dict[tuple[str, str], dict[str, str]] = {
    ("", "Add"): {"T": _NUMBERS},
    ("", "Cast"): {"T1": _ANY, "T2": _ANY},
    ("", "Concat"): {"T": _ANY},
    ("", "Div"): {"T": _NUMBERS},
    ("", "Gather"): {"T": _ANY, "Tind": "int32 int64"},
    ("", "Gelu"): {"T": _FLOATS},
    ("", "Gemm"): {"T": _FLOATS},
    ("", "LayerNormalization"): {"T": _FLOATS, "U": "float"},
    ("", "MatMul"): {"T": _FLOATS},
    ("", "Mul"): {"T": _NUMBERS},
    ("", "RMSNormalization"): {"T": _FLOATS, "V": _FLOATS},
    ("", "Relu"): {"T": _FLOATS},
    ("", "Reshape"): {"T": _ANY, "shape": "int64"},
    ("", "Sigmoid"): {"T": _FLOATS},
    ("", "Split"): {"T": _ANY},
    ("", "Tanh"): {"T": _FLOATS},
    (MICROSOFT, "PagedAttention"): {"T": "float16", "T_CACHE": "float16", "S": "int32"},
}


def check_cuda_kernels(model: ir.Model) -> None:
    """Refuses a graph with a node that the CUDA provider couldn't run."""
    opset = model.opset_imports[""]
    for node in model.graph:
        kernel = KERNELS.get((node.domain, node.op_type))
        if kernel is None:
            raise UnsupportedModelError(
                f"the CUDA provider has no kernel for {node.op_type}, which this model's fp16 "
                "graph needs. Leave fp16 out of --precision"
            )
        for type_name, found in _types(node, opset):
            if type_name in kernel and found not in kernel[type_name].split():
                raise UnsupportedModelError(
                    f"the CUDA provider's kernel for {node.op_type} takes no {found}, which this "
                    f"model's fp16 graph gives it. It takes {kernel[type_name]}"
                )


def _types(node: ir.Node, opset: int) -> Iterator[tuple[str, str]]:
    """The schema's name for the type of each input and output, and the type found there."""
    inputs, outputs = _formal_types(node.domain, node.op_type, opset)
    for names, values in ((inputs, node.inputs), (outputs, node.outputs)):
        for index, value in enumerate(values):
            if value is not None and value.dtype is not None:
                # The last formal input stands for all further ones, as in Concat.
                yield names[min(index, len(names) - 1)], _name(value.dtype)


def _name(dtype: ir.DataType) -> str:
    return str(dtype.name).lower()


@functools.cache
def _formal_types(domain: str, operator: str, opset: int) -> tuple[Sequence[str], Sequence[str]]:
    if domain == MICROSOFT:
        schema = _runtime_schemas()[operator]
        return [x.typeStr for x in schema.inputs], [x.typeStr for x in schema.outputs]
    standard = onnx.defs.get_schema(operator, opset, domain)
    return [x.type_str for x in standard.inputs], [x.type_str for x in standard.outputs]


@functools.cache
def _runtime_schemas() -> dict[str, Any]:
    return {x.name: x for x in get_all_operator_schema() if x.domain == MICROSOFT}
