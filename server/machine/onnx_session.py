"""Opens graphs on a device, and says in words why CUDA can't be had.

Knows: ONNX Runtime's providers, the libraries that CUDA needs. Does not know: blocks, bundles.

A provider that can't be loaded makes ONNX Runtime go on with the CPU, with only a line of its own
in the log. Here that is an error: no other device serves than the one that was chosen.
"""

import contextlib
import ctypes
import io
import os
from collections.abc import Iterator
from pathlib import Path

import onnxruntime

from quill.export.operators.library import library_path, operators_problem
from quill.export.precisions import Device
from quill.server.errors import StartError

PROVIDERS: dict[Device, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# What the CUDA provider of ONNX Runtime 1.31 is linked to.
DRIVER = "libcuda.so.1"
CUDA_RUNTIME = "libcudart.so.13"
LIBRARIES = (CUDA_RUNTIME, "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10")

# If the card doesn't say how much it has free: few serve models with less.
ASSUMED_FREE_BYTES = 4 * 2**30


def open_graph(
    graph: Path | bytes, device: Device = "cpu", num_threads: int = 0, spinning: bool = True
) -> onnxruntime.InferenceSession:
    """Loads a graph for a device; there is no falling back to another. `num_threads` 0: one a
    core. `spinning`: threads stay awake for a while after a step, which is faster, but busy."""
    name = graph if isinstance(graph, Path) else "a graph"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    options.log_severity_level = 3  # errors only; they come as exceptions too
    if device == "cuda":
        return _open_on_cuda(graph, options)
    problem = operators_problem()
    if problem is not None:
        raise StartError(f"{name} needs more than ONNX Runtime has. {problem}")
    try:
        options.register_custom_ops_library(os.fspath(library_path()))
        return onnxruntime.InferenceSession(
            graph, options, providers=[PROVIDERS["cpu"]], enable_fallback=False
        )
    except Exception as error:  # a damaged graph, no memory; the runtime has no class for these
        raise StartError(f"{name} can't be opened. {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What the runtime has to say, in one line."""
    return f"ONNX Runtime says: {(str(error).splitlines() or [type(error).__name__])[0]}"


def _open_on_cuda(
    graph: Path | bytes, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    # Memory is taken as it is needed, not in ever larger blocks.
    provider = (PROVIDERS["cuda"], {"arena_extend_strategy": "kSameAsRequested"})
    try:
        session = onnxruntime.InferenceSession(
            graph, options, providers=[provider], enable_fallback=False
        )
    except Exception as error:  # no card, too little memory; the runtime has no class for these
        raise StartError(f"the CUDA provider says: {str(error).splitlines()[0]}") from error
    if PROVIDERS["cuda"] not in session.get_providers():
        raise StartError("ONNX Runtime can't load its CUDA provider")
    return session


def cuda_problem() -> str | None:
    """What is missing for CUDA, in words. None: nothing, it works."""
    if PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        return "this ONNX Runtime has no CUDA provider (onnxruntime-gpu has)"
    if not _loads(DRIVER):
        return f"this machine has no NVIDIA driver ({DRIVER})"
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it doesn't find
        onnxruntime.preload_dlls()
    missing = [name for name in LIBRARIES if not _loads(name)]
    if missing:
        return f"this machine lacks {', '.join(missing)}"
    try:
        with _quiet():
            open_graph(identity_graph(1), "cuda", 1)
    except StartError as error:
        return str(error)
    return None


def cuda_free_bytes() -> int:
    """Memory that the card has free, as CUDA counts it."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        failed = ctypes.CDLL(CUDA_RUNTIME).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    except OSError:
        return ASSUMED_FREE_BYTES
    return ASSUMED_FREE_BYTES if failed else free.value


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While CUDA is only tried out, what the runtime writes about it would look like an error."""
    onnxruntime.set_default_logger_severity(4)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(2)  # the runtime's own default: warnings


IR_VERSION = 10
OPSET = 19  # CUDA has Identity for every type since long before
UINT8 = 2


def input_name(index: int) -> str:
    return f"from_{index}"


def output_name(index: int) -> str:
    return f"to_{index}"


def identity_graph(num_copies: int) -> bytes:
    """An ONNX model: each of its outputs is one of its inputs, as bytes of any number."""
    pairs = [(input_name(i).encode(), output_name(i).encode()) for i in range(num_copies)]
    nodes = (
        _field(1, source) + _field(2, target) + _field(4, b"Identity") for source, target in pairs
    )
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"copies")
    graph += b"".join(_field(11, _bytes_named(source)) for source, _ in pairs)
    graph += b"".join(_field(12, _bytes_named(target)) for _, target in pairs)
    return _number(1, IR_VERSION) + _field(8, _number(2, OPSET)) + _field(7, graph)


def _bytes_named(name: bytes) -> bytes:
    """A ValueInfoProto: bytes of any number."""
    any_number = _field(1, b"")
    tensor_type = _number(1, UINT8) + _field(2, any_number)
    return _field(1, name) + _field(2, _field(1, tensor_type))


def _field(tag: int, content: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(content)) + content


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Protobuf's way: seven bits a byte, the lowest first, the eighth says that more follow."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes((*encoded, value))
