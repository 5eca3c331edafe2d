"""`hf:org/name` against a local server that speaks the hub's protocol."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.sources.hub_server import Hub, read_directory, running_hub

# A process of its own: the library reads the environment when it is imported.
FETCH = """
import sys
from quill.model.errors import ModelError
from quill.model.sources.hub import fetch_from_hub
try:
    print(fetch_from_hub(sys.argv[1]))
except ModelError as error:
    sys.exit(f"refused: {error}")
"""
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
}
OTHERS = {
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"graph",
    "README.md": b"# Tiny",
    "model-00001-of-00002.safetensors": b"shard",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(MODEL | OTHERS) as hub:
        yield hub


def fetch(hub: Hub, given: str, cache: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        **{"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache / "home")},
        **{"QUILL_CACHE": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    }
    command = [sys.executable, "-c", FETCH, given]
    environment = {**os.environ, **environment, **more}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def fetched(hub: Hub, given: str, cache: Path, **more: str) -> Path:
    done = fetch(hub, given, cache, **more)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def test_only_what_is_needed_is_fetched_and_only_once(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, "hf:org/tiny", tmp_path)
    path = Path(done.stdout.splitlines()[-1])
    assert "licence: mit" in done.stderr
    assert done.stdout == f"{path}\n"  # whoever started `quill export` reads the last line
    assert read_directory(path) == MODEL
    assert sorted(hub.fetched) == sorted(MODEL)
    assert fetched(hub, "hf:org/tiny@main", tmp_path) == path
    assert sorted(hub.fetched) == sorted(MODEL)


def test_without_a_network_the_model_is_there_as_it_was_last_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    path = fetched(hub, "hf:org/tiny", tmp_path)
    assert fetched(hub, "hf:org/tiny", tmp_path, HF_HUB_OFFLINE="1") == path
    done = fetch(hub, "hf:org/other", tmp_path, HF_HUB_OFFLINE="1")
    assert "no hub is reachable" in done.stderr


def test_one_gguf_file_is_fetched_by_name_or_if_it_is_the_only_one(tmp_path: Path) -> None:
    ggufs = {"a.gguf": b"GGUFa", "b.gguf": b"GGUFb", "c-00001-of-00002.gguf": b"GGUF"}
    with running_hub(ggufs) as hub:
        assert fetched(hub, "hf:org/tiny:b.gguf", tmp_path).read_bytes() == b"GGUFb"
        several = fetch(hub, "hf:org/tiny", tmp_path).stderr
        assert "several GGUF files: a.gguf, b.gguf. Give one: hf:org/tiny:a.gguf" in several
        missing = fetch(hub, "hf:org/tiny:x.gguf", tmp_path).stderr
        assert "there is no x.gguf; the repository has a.gguf, b.gguf" in missing
        assert "split" in fetch(hub, "hf:org/tiny:c-00001-of-00002.gguf", tmp_path).stderr
        del hub.files["b.gguf"]
        assert fetched(hub, "hf:org/tiny", tmp_path).read_bytes() == b"GGUFa"


def test_nothing_is_written_outside_of_the_cache(tmp_path: Path) -> None:
    outside = tmp_path / "outside.gguf"
    with running_hub({str(outside): b"GGUF", "a/../../b.gguf": b"GGUF"}) as hub:
        done = fetch(hub, "hf:org/tiny", tmp_path / "cache")
    assert "refused" in done.stderr
    assert hub.fetched == []
    with running_hub({"a.gguf": b"GGUF"}) as hub:
        hub.commit = "../../../../../outside"
        done = fetch(hub, "hf:org/tiny", tmp_path / "cache")
    assert "which is no hash" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["cache"]


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file")
    done = fetch(hub, "hf:org/tiny", tmp_path)
    assert "refused: Could not keep org--tiny in" in done.stderr


def test_pickles_are_never_fetched(tmp_path: Path) -> None:
    with running_hub({"config.json": b"{}", "pytorch_model.bin": b"pickle"}) as hub:
        done = fetch(hub, "hf:org/tiny", tmp_path)
    assert "pytorch_model.bin is a pickle, which could run any code" in done.stderr
    assert hub.fetched == []


def test_an_interrupted_download_goes_on_where_it_ended(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(25_000_000)
    with running_hub({"a.gguf": content}) as hub:
        hub.cut_after, hub.fail_after_cut = 15_000_000, True
        done = fetch(hub, "hf:org/tiny", tmp_path)
        assert "status 500" in done.stderr
        hub.cut_after, hub.was_cut = None, False
        assert fetched(hub, "hf:org/tiny", tmp_path).read_bytes() == content
    ranges = [found for path, found in hub.requests if path.endswith(".gguf")]
    assert ranges[0] is None
    assert ranges[-1] == "bytes=10485760-"  # the library keeps pieces of 10 MiB


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_wrong_hash_is_refused_and_not_kept(hub: Hub, tmp_path: Path, file: str) -> None:
    hub.wrong = {file}
    done = fetch(hub, "hf:org/tiny", tmp_path)
    assert f"{file} of org/tiny arrived with another hash" in done.stderr
    hub.wrong = set()
    assert read_directory(fetched(hub, "hf:org/tiny", tmp_path)) == MODEL


def test_a_token_is_sent_and_its_lack_is_explained(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    done = fetch(hub, "hf:org/tiny", tmp_path)
    assert "for a private one set HF_TOKEN" in done.stderr
    hub.is_gated = True
    done = fetch(hub, "hf:org/tiny", tmp_path)
    assert "asks for consent to its terms" in done.stderr
    assert fetched(hub, "hf:org/tiny", tmp_path, HF_TOKEN="secret").is_dir()


def test_what_is_not_there_is_named_without_addresses(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, "hf:org/other", tmp_path)
    assert "hf:org/other: the hub has no such model" in done.stderr
    done = fetch(hub, "hf:org/tiny@v9", tmp_path)
    assert "no such revision" in done.stderr
    assert hub.address not in done.stderr
