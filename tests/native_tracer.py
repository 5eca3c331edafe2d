"""Traces networks natively for tests that run on an emulated processor (`make test-portable`).

Tracing is Python's work and comes out the same everywhere, but takes minutes under emulation. So it
is given to a child, which the kernel runs as it is: what the graphs compute is what is emulated.
"""

import atexit
import functools
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

PIPE = subprocess.PIPE


def install() -> None:
    """From here on, whoever asks for a trace gets a native one."""
    from quill.export.graph import trace

    trace.trace = traced_natively


def traced_natively(graph: Any) -> ir.Model:
    with tempfile.TemporaryDirectory() as directory:
        given, made = Path(directory, "graph.pickle"), Path(directory, "graph.onnx")
        given.write_bytes(pickle.dumps(graph))
        child = _child()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{given} {made}\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        assert answer == "traced", f"the native tracer said {answer!r} and ended"
        model = ir.from_proto(ir.to_proto(ir.load(made)))  # in memory: the file goes
    # Stand-ins are known by their addresses (export/graph/stand_ins.py), which are this process's.
    module = graph.module
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    for name, value in model.graph.initializers.items():
        if name in tensors:
            value.const_value = TorchTensor(tensors[name].detach(), name=name)
    return model


@functools.cache
def _child() -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.native_tracer"]
    child = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    atexit.register(child.kill)
    return child


def main() -> None:
    from quill.export.graph.trace import trace

    for line in sys.stdin:
        given, made = line.split()
        ir.save(trace(pickle.loads(Path(given).read_bytes())), made)
        print("traced", flush=True)


if __name__ == "__main__":
    main()
