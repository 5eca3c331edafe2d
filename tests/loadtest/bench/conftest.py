"""Benchmarks in tests have no pauses between turns."""

import pytest


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quill.loadtest.bench.experiment.PAUSE_S", 0.0)
    monkeypatch.setattr("quill.loadtest.bench.server.WARM_UP_S", 0.02)
