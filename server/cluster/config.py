"""`quill cluster config`: what a Ray cluster, or KubeRay, is given.

Knows: the command's arguments. Does not know: Ray. It needs none on the machine where it runs.
"""

import argparse

from quill.server.cluster.plan import read_plan
from quill.server.cluster.ray_service import write_ray_service
from quill.server.cluster.serve_config import write_serve_config

THREADS = 4


def run(args: argparse.Namespace) -> None:
    plan = read_plan(args, threads=THREADS, one_machine=False)
    if args.ray_service:
        print(write_ray_service(plan, args.image), end="")
    else:
        print(write_serve_config(plan), end="")
