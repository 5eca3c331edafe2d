"""The same cluster for Kubernetes: a RayService, as the KubeRay operator (1.5.1 or newer) reads it.

Knows: KubeRay's names. Does not know: what the operator does with them: it was never run here.
"""

import json

from quill.server.cluster.environment import ray_environment
from quill.server.cluster.plan import Plan
from quill.server.cluster.serve_config import write_serve_config

RAY = "2.60.0"
_MEMORY = "4Gi"


def write_ray_service(plan: Plan, image: str) -> str:
    """`image`: one with Quill and its extra cluster; there is no Dockerfile for it yet."""
    config = _indented(write_serve_config(plan), 4)
    environment = _indented(_environment(plan), 16)
    return _MANIFEST.format(
        ray=RAY,
        image=image,
        config=config,
        environment=environment,
        port=plan.port,
        cpus=plan.cpus,
        memory=_MEMORY,
        least=plan.least,
        most=plan.most,
        grace_s=round(plan.shutdown_s) + 30,
        authority="" if plan.options.api_keys is None else _KEYS,
    )


def _environment(plan: Plan) -> str:
    # The operator sets the token and its mode by itself.
    values = ray_environment(plan.longest_answer_s, plan.drain_s)
    kept = {name: value for name, value in values.items() if not name.startswith("RAY_AUTH")}
    some = ((name, json.dumps(value)) for name, value in kept.items())
    return "\n".join(f"- {{name: {name}, value: {value}}}" for name, value in some)


def _indented(text: str, num: int) -> str:
    return "\n".join(f"{' ' * num}{line}".rstrip() for line in text.splitlines())


_KEYS = """
# The API keys must be at the path that args names, on every pod: mount a secret there.
"""

_MANIFEST = """\
# Quill on Kubernetes with KubeRay 1.5.1 or newer: kubectl apply -f this file.
# Never run by those who wrote it: read it before you rely on it.{authority}
# A bundle that args names by a path must be on every pod, for example on a volume or in the image.
apiVersion: ray.io/v1
kind: RayService
metadata:
  name: quill
spec:
  # What `serve deploy` would be given.
  serveConfigV2: |
{config}
  rayClusterConfig:
    rayVersion: "{ray}"
    authOptions:
      mode: token # the operator makes a token, and gives it to every pod
    enableInTreeAutoscaling: true # pods follow replicas
    headGroupSpec:
      rayStartParams:
        num-cpus: "0" # no replica on the head
        dashboard-host: "0.0.0.0" # the operator deploys through it
      template:
        spec:
          automountServiceAccountToken: true # the autoscaler beside it asks Kubernetes for pods
          containers:
            - name: ray-head
              image: {image}
              env: &environment
{environment}
              ports:
                - {{name: gcs-server, containerPort: 6379}}
                - {{name: dashboard, containerPort: 8265}}
                - {{name: grpc, containerPort: {port}}}
              resources:
                requests: {{cpu: "1", memory: 2Gi}}
                limits: {{memory: 2Gi}}
    workerGroupSpecs:
      - groupName: replicas
        replicas: {least}
        minReplicas: {least}
        maxReplicas: {most}
        rayStartParams: {{}}
        template:
          spec:
            # A replica that ends finishes its longest answer first.
            terminationGracePeriodSeconds: {grace_s}
            containers:
              - name: ray-worker
                image: {image}
                env: *environment
                ports:
                  - {{name: grpc, containerPort: {port}}}
                resources:
                  requests: {{cpu: "{cpus}", memory: {memory}}}
                  limits: {{memory: {memory}}}
"""
