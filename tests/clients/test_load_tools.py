"""Load tests that we didn't write, to their end: AIPerf over chats, perf_analyzer over KServe.

They are large and choosy, so they aren't installed by `make test-clients`. AIPERF and
PERF_ANALYZER name the programs, wherever they are; without them these tests skip.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import BUNDLE, Server

TIMEOUT_S = 500.0


AIPERF = os.environ.get("AIPERF")
PERF_ANALYZER = os.environ.get("PERF_ANALYZER")
NO_AIPERF = "AIPERF isn't set: pip install aiperf in an environment of its own, 1.2 GB"
NO_ANALYZER = (
    "PERF_ANALYZER isn't set: it is in tritonclient 2.50.0's wheel, and needs libb64-0d, and "
    "libcudart.so.12 (nvidia-cuda-runtime-cu12) on LD_LIBRARY_PATH"
)


def tokenizer(server: Server, directory: Path) -> Path:
    """The default bundle's, as AIPerf reads one. It makes up prompts with it."""
    code = "from quill.loadtest.bench.models import bundle_of; print(bundle_of(None))"
    bundle = os.environ.get(BUNDLE) or server.ours(code).strip()
    shutil.copy(Path(bundle, "tokenizer.json"), directory)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.skipif(AIPERF is None, reason=NO_AIPERF)
def test_aiperf_runs_to_its_end(server: Server, tmp_path: Path) -> None:
    assert AIPERF is not None
    options = ["--endpoint-type", "chat", "--streaming", "--concurrency", "4"]
    options += ["--request-count", "16", "--output-tokens-mean", "16", "--ui", "simple"]
    options += ["--synthetic-input-tokens-mean", "32", "--use-server-token-count"]
    options += [
        "--extra-inputs",
        "ignore_eos:true",
        "--tokenizer",
        str(tokenizer(server, tmp_path)),
    ]
    places = ["--url", server.http, "--model", server.model, "--artifact-dir", str(tmp_path)]
    subprocess.run(
        [AIPERF, "profile", *places, "--api-key", server.key, *options],
        check=True, timeout=TIMEOUT_S, capture_output=True,
    )  # fmt: skip
    told = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == 16
    assert told["request_error_rate"]["avg"] == 0
    assert told["time_to_first_token"]["avg"] > 0
    assert told["total_usage_completion_tokens"]["avg"] == 16 * 16


@pytest.mark.skipif(PERF_ANALYZER is None, reason=NO_ANALYZER)
def test_perf_analyzer_runs_to_its_end(server: Server, tmp_path: Path) -> None:
    assert PERF_ANALYZER is not None
    sampling = json.dumps({"max_tokens": 16, "temperature": 0, "ignore_eos": True})
    step = {"text_input": ["Once upon a time"], "stream": [True], "sampling_parameters": [sampling]}
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps({"data": [step]}))
    options = ["-m", "quill", "-i", "grpc", "--streaming", "-u", server.address]
    options += ["--input-data", str(asked), "--concurrency-range", "2"]
    options += ["--measurement-mode", "count_windows", "--measurement-request-count", "8"]
    options += ["--stability-percentage", "999", "-H", f"authorization:Bearer {server.key}"]
    done = subprocess.run(
        [PERF_ANALYZER, *options], check=True, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert "Response Throughput" in done.stdout
    assert "Successful request count" in done.stdout
    ends = [line["outcome"] for line in server.lines() if line["frontend"] == "kserve"]
    assert set(ends) == {"OK"}
