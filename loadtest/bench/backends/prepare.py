"""Turns a model into what the peers read, once: their files, and the logits of the reference.

    python -m quill.loadtest.bench.backends.prepare MODEL.gguf DIRECTORY FILE…

Knows: the peers' converters. Does not know: speed. Runs in the peers' virtual environments
(`make peers`), never in Quill's: it needs torch and transformers there.

DIRECTORY has the same weights in float32 as a Hugging Face directory, `hf`: the GGUF's values,
dequantized. llama.cpp requantizes from its own file; its Q8_0 holds values of 4 bits almost
exactly, its Q4_0 doesn't. A file that can't be made is left out, and the others are made.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Model(NamedTuple):
    gguf: Path
    directory: Path

    @property
    def hugging_face(self) -> Path:
        return self.directory / "hf"


Maker = Callable[[Model, Path], None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes files for the peers from a model.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    model = Model(args.gguf, args.directory)
    failed = [file for file in args.files if not _make(model, file)]
    sys.exit(f"couldn't make {', '.join(failed)}" if failed else 0)


def _make(model: Model, file: str) -> bool:
    """Whole or absent: what was half made has another name."""
    print(f"making {file}", file=sys.stderr, flush=True)
    partial = model.directory / f"partial-{file}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    try:
        _maker_of(file)(model, partial)
    except Exception:  # of somebody else's converter
        traceback.print_exc()
        return False
    partial.rename(model.directory / file)
    return True


def _maker_of(file: str) -> Maker:
    if found := re.fullmatch(r"reference-(\d+)\.npy", file):
        return _reference_maker(int(found[1]))
    return MAKERS[file]


def _requantizer(number: int) -> Maker:
    """To one of llama.h's file types."""

    def make(model: Model, out: Path) -> None:
        import llama_cpp

        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = number
        settings.allow_requantize = True
        settings.nthread = os.cpu_count() or 1
        code = llama_cpp.llama_model_quantize(
            str(model.gguf).encode(), str(out).encode(), ctypes.byref(settings)
        )
        if code != 0:
            raise RuntimeError(f"llama_model_quantize failed with code {code}")

    return make


def _openvino_converter(*options: str) -> Maker:
    """A `weight format`, and how its values are grouped."""

    def make(model: Model, out: Path) -> None:
        program = str(Path(sys.executable).with_name("optimum-cli"))
        command = [program, "export", "openvino", "-m", str(model.hugging_face)]
        command += ["--task", "text-generation-with-past", "--weight-format", *options, str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    return make


def _make_ct2(model: Model, out: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(model.hugging_face)).convert(str(out), quantization="int8")


def _genai_builder(kind: str) -> Maker:
    def make(model: Model, out: Path) -> None:
        cache = out.with_name("partial-cache")
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(model.hugging_face), "-o", str(out), "-e", "cpu", "-c", str(cache)]
        command += ["-p", kind, "--extra_options", "accuracy_level=4", "prune_lm_head=true"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(cache, ignore_errors=True)

    return make


MAKERS: dict[str, Maker] = {
    "q8_0.gguf": _requantizer(7),
    "q4_0.gguf": _requantizer(2),
    "iq4_nl.gguf": _requantizer(25),
    "openvino-int8": _openvino_converter("int8"),
    "openvino-int4": _openvino_converter("int4", "--group-size", "32", "--ratio", "1.0"),
    "ct2-int8": _make_ct2,
    "genai-int4": _genai_builder("int4"),
    "genai-int8": _genai_builder("int8"),
}


def _reference_maker(num_passages: int) -> Maker:
    """Logits of transformers in float32 after each token but each passage's last."""

    def make(model: Model, out: Path) -> None:
        import numpy as np
        import torch
        import transformers

        given = json.loads((model.directory / "passages.json").read_text(encoding="utf-8"))
        passages: Sequence[Sequence[int]] = given["passages"][:num_passages]
        network: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model.hugging_face, dtype=torch.float32
        ).eval()
        shape = sum(len(ids) - 1 for ids in passages), network.config.vocab_size
        array_TV = np.lib.format.open_memmap(out, "w+", np.float32, shape)
        first = 0
        for ids in passages:
            with torch.inference_mode():
                logits_TV = network(torch.tensor([list(ids)])).logits[0, :-1]
            array_TV[first : first + len(logits_TV)] = logits_TV.numpy()
            first += len(logits_TV)
        array_TV.flush()

    return make


if __name__ == "__main__":
    main()
