"""What a person types becomes a plan, serve.yaml and a RayService that say the same."""

import argparse
import dataclasses
import subprocess
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, generate_latest

from quill.__main__ import build_parser, main
from quill.server.cluster.environment import ray_environment
from quill.server.cluster.plan import Plan, check_exposure, read_plan
from quill.server.cluster.ray_service import write_ray_service
from quill.server.cluster.replica.detour import SERVICERS, detouring_methods
from quill.server.cluster.replica.labelled import labelled
from quill.server.cluster.replica.options import ReplicaOptions, read_options
from quill.server.cluster.scaling import wanted_replicas
from quill.server.cluster.serve_config import write_serve_config
from quill.server.errors import StartError


def typed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["cluster", "config", "s3://models/tiny", *words])


def planned(*words: str) -> Plan:
    return read_plan(typed(*words), threads=4, one_machine=False)


def config(*words: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(write_serve_config(planned(*words)))
    return read


def replica(*words: str) -> dict[str, Any]:
    (application,) = config(*words)["applications"]
    found: dict[str, Any] = application["deployments"][0]
    return found


def test_range_scales_and_a_number_does_not() -> None:
    assert replica("--replicas", "3")["num_replicas"] == 3
    scaling = replica("--replicas", "2..8", "--max-num-seqs", "20")["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 8)
    assert scaling["target_ongoing_requests"] == 14
    assert "num_replicas" not in replica("--replicas", "2..8")


@pytest.mark.parametrize("text", ["0", "3..2", "2..", "..2", "two", "-1"])
def test_other_numbers_of_replicas_are_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        typed(f"--replicas={text}")
    assert "--replicas" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["00", "g" * 64, "0" * 65])
def test_what_is_no_hash_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        typed(f"--sha256={text}")
    assert "isn't a SHA-256" in capsys.readouterr().err


def test_replica_has_time_for_the_longest_answer() -> None:
    words = ("--drain-timeout", "900")
    plan = planned(*words)
    assert replica(*words)["graceful_shutdown_timeout_s"] == 900 + plan.drain_s
    hard_stop = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S="
    (line,) = (each for each in write_serve_config(plan).splitlines() if hard_stop in each)
    assert int(line.partition("=")[2]) > 900, "nor does HAProxy cut it off"


def test_environment_survives_the_shell_and_yaml() -> None:
    """One of its values has several lines."""
    plan = planned()
    expected = ray_environment(plan.longest_answer_s, plan.drain_s)
    assert any("\n" in value for value in expected.values())
    lines = [line[4:] for line in write_serve_config(plan).splitlines() if "#   export" in line]
    script = "\n".join([*lines, *(f'printf "%s\\0" "${name}"' for name in expected)])
    said = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert said.stdout.split("\0")[:-1] == list(expected.values())
    head = yaml.safe_load(write_ray_service(plan, "image"))["spec"]["rayClusterConfig"]
    (container,) = head["headGroupSpec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given == {name: value for name, value in expected.items() if "AUTH" not in name}


def test_args_are_what_a_replica_reads() -> None:
    (application,) = config("--threads", "2", "--api-keys", "/srv/keys.json")["applications"]
    options = read_options(application["args"])
    assert options.bundle == "s3://models/tiny"
    assert (options.threads, options.api_keys) == (2, "/srv/keys.json")
    assert set(application["args"]) == {each.name for each in fields(ReplicaOptions)}
    settings = options.settings()
    assert settings.threads == 2
    assert settings.port != 0


def test_args_that_are_unknown_or_missing_are_named() -> None:
    with pytest.raises(StartError, match="thread; it may have"):
        read_options({"bundle": "a", "thread": 1})
    with pytest.raises(StartError, match="needs a bundle"):
        read_options({})


def test_every_value_is_explained() -> None:
    text = write_serve_config(planned())
    (application,) = yaml.safe_load(text)["applications"]
    for name in application["args"]:
        (line,) = (each for each in text.splitlines() if each.startswith(f"      {name}: "))
        assert " # " in line


def test_ports_of_rays_own_workers_and_of_replicas_are_refused() -> None:
    with pytest.raises(StartError, match="for Ray's own workers"):
        planned("--port", "15000")
    with pytest.raises(StartError, match="for the replicas"):
        planned("--port", "31500")
    with pytest.raises(StartError, match="give a number"):
        planned("--port", "0")


def test_paths_of_bundles_are_whole_wherever_replicas_run() -> None:
    args = build_parser().parse_args(["cluster", "up", "bundles/tiny"])
    plan = read_plan(args, threads=1, one_machine=True)
    assert plan.options.bundle == str(Path("bundles/tiny").absolute())
    assert planned().options.bundle == "s3://models/tiny"


def test_other_machines_are_let_in_only_knowingly() -> None:
    here = dataclasses.replace(planned(), host="127.0.0.1")
    check_exposure(here, insecure=False)
    everywhere = dataclasses.replace(here, host="0.0.0.0")
    check_exposure(everywhere, insecure=True)
    with pytest.raises(StartError, match="in the clear"):
        check_exposure(everywhere, insecure=False)


def test_ray_service_has_the_same_config_and_no_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--replicas", "2..8", "--threads", "3"]
    command = ["cluster", "config", "s3://models/tiny", *words]
    assert main([*command, "--ray-service", "--image", "here/quill:1"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    spec = manifest["spec"]
    assert yaml.safe_load(spec["serveConfigV2"]) == config(*words)
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 8)
    (container,) = workers["template"]["spec"]["containers"]
    assert (container["image"], container["resources"]["requests"]["cpu"]) == ("here/quill:1", "3")
    names = [each["name"] for each in container["env"]]
    assert "RAY_SERVE_ENABLE_HA_PROXY" in names
    assert not [name for name in names if name.startswith("RAY_AUTH")], "the operator's own"
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert "mount a secret" in write_ray_service(planned("--api-keys", "k"), "image")


def test_replicas_are_as_many_as_requests_need() -> None:
    def wanted(*counts: float) -> int:
        metrics = {"requests": dict(enumerate(counts))}
        config = SimpleNamespace(target_ongoing_requests=4)
        context = SimpleNamespace(aggregated_metrics=metrics if counts else {}, config=config)
        return wanted_replicas(context)[0]

    assert wanted() == 1
    assert wanted(0, 0, 0) == 1
    assert wanted(4, 4) == 2
    assert wanted(9, 0, 0) == 3


def test_metrics_say_which_replica_they_are_of() -> None:
    registry = CollectorRegistry()
    counter = Counter("quill_things", "Things", ["kind"], registry=registry)
    counter.labels("good").inc()
    shown = labelled(registry, replica="abc")
    counter.labels("good").inc()
    assert 'quill_things_total{kind="good",replica="abc"} 2.0' in generate_latest(shown).decode()


def test_all_services_are_known_to_rays_own_proxy() -> None:
    methods = detouring_methods()
    assert {"Generate", "GenerateStream", "Reload", "ModelStreamInfer", "Check"} <= set(methods)
    for servicer in SERVICERS:
        module, _, function = servicer.partition(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))
