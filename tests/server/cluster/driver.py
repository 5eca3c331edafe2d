"""Ray as a process of its own: Ray changes the process that starts it, and tests must go on.

Its first line on stdout is the environment for programs that connect to this Ray. Whenever the
deployment's progress changes, it prints the progress. It ends with stdin.
"""

import json
import os
import pickle
import sys
import threading

from quill.server.cluster.local_ray import local_ray, progress

POLL_S = 0.2


def main() -> None:
    plan, dashboard_port = pickle.loads(bytes.fromhex(sys.argv[1])), int(sys.argv[2])
    ended = threading.Event()
    with local_ray(plan, dashboard_port):
        import ray

        environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        print(json.dumps(environment), flush=True)
        threading.Thread(target=_wait_for_end, args=(ended,)).start()
        before = None
        while not ended.wait(POLL_S):
            now = progress()._asdict()
            if now != before:
                print(json.dumps(now), flush=True)
            before = now


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main()
