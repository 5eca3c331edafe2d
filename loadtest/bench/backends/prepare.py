"""Turns SmolLM2's GGUF file into what each peer reads, once, in a directory of its own.

Knows: the peers' converters. Does not know: speed. Runs in the peers' virtual environment
(`make peers`), never in Quill's: it needs torch and transformers there.

    python -m quill.loadtest.bench.backends.prepare MODEL.gguf TOKENIZER.json DIRECTORY

All of them get the same weights: the GGUF's values, dequantized. llama.cpp requantizes from its
own file; its Q8_0 holds Q4_1's values almost exactly, its Q4_0 doesn't.
"""

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GGUF_KINDS = {"q8_0": 7, "q4_0": 2}  # llama.h's numbers of file types
GENAI_KINDS = {
    "int4": ["-p", "int4", "--extra_options", "accuracy_level=4", "prune_lm_head=true"],
    "int8": ["-p", "int8", "--extra_options", "accuracy_level=4", "prune_lm_head=true"],
    "fp32": ["-p", "fp32", "--extra_options", "prune_lm_head=true"],
}
CT2_KINDS = ("int8", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the peers' models from a GGUF file.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    hugging_face = args.out / "hf"
    _once(hugging_face, lambda path: _make_hugging_face(args.gguf, args.tokenizer, path))
    for kind, number in GGUF_KINDS.items():
        _once(args.out / f"{kind}.gguf", _requantizer(args.gguf, number))
    for kind in CT2_KINDS:
        _once(args.out / f"ct2-{kind}", _ct2_converter(hugging_face, kind))
    for kind, options in GENAI_KINDS.items():
        _once(args.out / f"genai-{kind}", _genai_builder(hugging_face, options))


def _once(path: Path, make: Callable[[Path], None]) -> None:
    """Whole or absent: what was half made has another name."""
    if path.exists():
        return
    print(f"making {path.name}", file=sys.stderr, flush=True)
    partial = path.with_name(f"partial-{path.name}")
    if partial.is_dir():
        shutil.rmtree(partial)
    make(partial)
    partial.rename(path)


def _make_hugging_face(gguf: Path, tokenizer: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # What was read from a GGUF file can't be saved; the same weights in a plain model can.
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    plain: Any = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    shutil.copy(tokenizer, out / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings |= {"bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"}  # CTranslate2 wants all
    (out / "tokenizer_config.json").write_text(json.dumps(settings))


def _requantizer(gguf: Path, number: int) -> Callable[[Path], None]:
    def make(out: Path) -> None:
        import llama_cpp

        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = number
        settings.allow_requantize = True
        settings.nthread = 1
        code = llama_cpp.llama_model_quantize(
            str(gguf).encode(), str(out).encode(), ctypes.byref(settings)
        )
        if code != 0:
            raise SystemExit(f"llama_model_quantize failed with code {code}")

    return make


def _ct2_converter(hugging_face: Path, kind: str) -> Callable[[Path], None]:
    def make(out: Path) -> None:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(hugging_face)).convert(str(out), quantization=kind)

    return make


def _genai_builder(hugging_face: Path, options: list[str]) -> Callable[[Path], None]:
    def make(out: Path) -> None:
        cache = out.with_name("partial-cache")
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(hugging_face), "-o", str(out), "-e", "cpu", "-c", str(cache)]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(cache, ignore_errors=True)

    return make


if __name__ == "__main__":
    main()
