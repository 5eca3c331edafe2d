"""A cluster as a process of its own: Ray changes whoever starts it, and tests must go on.

Each line of stdin is a change of the plan, `{"least": 1, "most": 1, "options": {"queue": 9}}`.
The first line of stdout is what other programs need in their environment to reach this Ray. How far
the cluster is follows whenever that changes. It ends with stdin.
"""

import json
import os
import sys
import threading
from dataclasses import asdict, replace
from typing import Any

from quill.server.cluster.local_ray import LocalCluster, local_cluster
from quill.server.cluster.plan import Plan
from quill.server.cluster.replica.options import ReplicaOptions

POLL_S = 0.2


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    plan = Plan(options=ReplicaOptions(**given.pop("options")), **given)
    ended = threading.Event()
    with local_cluster(plan) as cluster:
        print(json.dumps({"environment": _environment()}), flush=True)
        cluster.deploy(plan)
        reading = threading.Thread(target=obey, args=(cluster, plan, ended))
        reading.start()
        before = None
        while not ended.wait(POLL_S):
            progress = asdict(cluster.progress())
            if progress != before:
                print(json.dumps(progress), flush=True)
            before = progress
        reading.join()


def _environment() -> dict[str, str]:
    import ray

    ours = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return ours | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def obey(cluster: LocalCluster, plan: Plan, ended: threading.Event) -> None:
    for line in sys.stdin:
        changes: dict[str, Any] = json.loads(line)
        options = replace(plan.options, **changes.pop("options", {}))
        plan = replace(plan, options=options, **changes)
        cluster.deploy(plan)
    ended.set()


if __name__ == "__main__":
    main()
