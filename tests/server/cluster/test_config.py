"""Command-line options become a plan, serve.yaml and a RayService with the same values."""

import argparse
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, generate_latest

from quill.__main__ import build_parser, main
from quill.server.cluster.plan import (
    ENVIRONMENT,
    Plan,
    ReplicaArgs,
    check_exposure,
    read_plan,
    wanted_replicas,
    write_ray_service,
    write_serve_config,
)
from quill.server.cluster.replica_server import labeled
from quill.server.errors import StartError
from quill.server.settings import CLUSTER_OPTIONS


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["cluster", "config", "s3://models/tiny", *words])


def planned(*words: str) -> Plan:
    return read_plan(parsed(*words), threads=4, one_machine=False)


def config(*words: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(write_serve_config(planned(*words)))
    return read


def application(*words: str) -> dict[str, Any]:
    (found,) = config(*words)["applications"]
    return dict(found)


def replica(*words: str) -> dict[str, Any]:
    (found,) = application(*words)["deployments"]
    return dict(found)


def test_range_scales_and_a_number_does_not() -> None:
    assert replica("--replicas", "3")["num_replicas"] == 3
    scaling = replica("--replicas", "2..8", "--max-num-seqs", "20")["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 8)
    assert scaling["target_ongoing_requests"] == 14
    assert "num_replicas" not in replica("--replicas", "2..8")


@pytest.mark.parametrize(
    "word",
    [
        *(f"--replicas={text}" for text in ("0", "3..2", "2..", "..2", "two", "-1")),
        *(f"--sha256={text}" for text in ("00", "g" * 64, "0" * 65)),
    ],
)
def test_values_of_another_form_are_rejected(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(word)
    assert f"argument {word.partition('=')[0]}:" in capsys.readouterr().err


def test_replica_has_time_for_the_longest_answer() -> None:
    assert application("--drain-timeout", "900")["args"]["longest_answer_s"] == 900
    assert replica("--drain-timeout", "900")["graceful_shutdown_timeout_s"] > 900


def test_replica_reads_the_args_that_were_written() -> None:
    words = ("--threads", "2", "--api-keys", "/srv/keys.json", "--allow-unauthenticated", "metrics")
    plan, written = planned(*words), application(*words)["args"]
    assert set(written) == {each.name for each in fields(ReplicaArgs)}
    assert tuple(written["settings"]) == CLUSTER_OPTIONS
    args = ReplicaArgs.read(written)
    assert replace(args, settings=plan.args.settings) == plan.args
    assert (args.bundle, args.frontend) == ("s3://models/tiny", "0.0.0.0:50051")
    settings = args.settings
    assert (settings.threads, settings.api_keys) == (2, Path("/srv/keys.json"))
    assert settings.allow_unauthenticated == ("metrics",)
    assert (settings.host, settings.metrics_ports, settings.http_ports) == ("0.0.0.0", (9464,), ())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"thread": 1}, "unknown args: thread"),
        ({"bundle": None}, "needs bundle"),
        ({"settings": {"thread": 1}}, "unknown options: thread"),
        ({"settings": {"threads": 0}}, "threads"),
    ],
)
def test_wrong_args_are_named(changes: dict[str, Any], text: str) -> None:
    values = {"bundle": "a", "host": "0.0.0.0", "port": 50051, **changes}
    with pytest.raises(StartError, match=text):
        ReplicaArgs.read({name: value for name, value in values.items() if value is not None})


def test_every_value_and_the_environment_are_explained() -> None:
    comments = [each for each in write_serve_config(planned()).splitlines() if each[:1] == "#"]
    for name in CLUSTER_OPTIONS:
        assert any(f"args.settings.{name}: " in line for line in comments), name
    for name, value in ENVIRONMENT.items():
        assert f"#   export {name}={value}" in comments


@pytest.mark.parametrize(
    ("port", "text"), [("15000", "Ray's workers"), ("31500", "replicas"), ("0", "a fixed port")]
)
def test_ports_of_others_are_rejected(port: str, text: str) -> None:
    with pytest.raises(StartError, match=text):
        planned("--port", port)


def test_paths_of_bundles_are_absolute() -> None:
    args = build_parser().parse_args(["cluster", "up", "bundles/tiny"])
    plan = read_plan(args, threads=1, one_machine=True)
    assert plan.args.bundle == str(Path("bundles/tiny").absolute())


def test_other_machines_may_call_only_with_insecure() -> None:
    check_exposure(planned("--host", "127.0.0.1"), insecure=False)
    check_exposure(planned(), insecure=True)
    with pytest.raises(StartError, match="doesn't encrypt"):
        check_exposure(planned(), insecure=False)


def test_ray_service_has_the_same_config_and_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--replicas", "2..8", "--threads", "3"]
    command = ["cluster", "config", "s3://models/tiny", *words, "--insecure"]
    assert main([*command, "--ray-service", "--image", "here/quill:1"]) == 0
    ray_service, service = yaml.safe_load_all(capsys.readouterr().out)
    assert yaml.safe_load(ray_service["spec"]["serveConfigV2"]) == config(*words)
    cluster = ray_service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 8)
    assert service["spec"]["selector"] == {"ray.io/group": workers["groupName"]}
    (container,) = workers["template"]["spec"]["containers"]
    assert (container["image"], container["resources"]["requests"]["cpu"]) == ("here/quill:1", "3")
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given == {name: value for name, value in ENVIRONMENT.items() if "AUTH" not in name}
    assert "Mount a secret" in write_ray_service(planned("--api-keys", "k"), "image")


def test_pods_of_a_ray_service_are_probed_and_have_no_privileges() -> None:
    ray_service, _ = yaml.safe_load_all(write_ray_service(planned("--port", "5000"), "image"))
    cluster = ray_service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["livenessProbe"]["exec"]["command"][0] == "python"
    words = pods[1]["containers"][0]["readinessProbe"]["exec"]["command"]
    assert build_parser().parse_args(words[1:]).address == "localhost:5000"


@pytest.mark.parametrize(("words", "unsaid"), [([], []), (["--api-keys", "k"], ["--api-keys"])])
def test_config_that_lets_others_call_needs_insecure(
    words: list[str], unsaid: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cluster", "config", "s3://models/tiny", *words]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "doesn't encrypt" in printed.err
    assert ("without --api-keys anybody may call" in printed.err) == (not unsaid)
    assert main([*command, "--host", "127.0.0.1"]) == 0
    assert main([*command, "--insecure"]) == 0


@pytest.mark.parametrize(
    ("counts", "wanted"), [((), 1), ((0, 0, 0), 1), ((4, 4), 2), ((9, 0, 0), 3)]
)
def test_policy_wants_as_many_replicas_as_requests_need(
    counts: tuple[int, ...], wanted: int
) -> None:
    metrics = {"requests": dict(enumerate(counts))} if counts else {}
    scaling = SimpleNamespace(target_ongoing_requests=4)
    context = SimpleNamespace(aggregated_metrics=metrics, config=scaling)
    assert wanted_replicas(context)[0] == wanted


def test_metrics_have_the_label_of_their_replica() -> None:
    registry = CollectorRegistry()
    counter = Counter("quill_things", "Things", ["kind"], registry=registry)
    shown = labeled(registry, replica="abc")
    counter.labels("good").inc()
    assert 'quill_things_total{kind="good",replica="abc"} 1.0' in generate_latest(shown).decode()
