"""Replicas come and go with the load, and nobody notices."""

import pytest

from tests.server.cluster.conftest import Keys
from tests.server.cluster.crowd import crowd
from tests.server.cluster.running_cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_replicas_follow_the_load(
    scaling_cluster: RunningCluster, keys: Keys, texts: dict[int, str]
) -> None:
    with crowd(scaling_cluster, keys.access("alice"), texts, 12):
        scaling_cluster.wait_for_replicas(3)
    with crowd(scaling_cluster, keys.access("alice"), texts, 1):
        scaling_cluster.wait_for_replicas(1)
