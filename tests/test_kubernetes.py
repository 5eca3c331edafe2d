"""The manifests fit together, use metrics that exist, and pass the tools' own checks.

No Kubernetes runs here: schemas, promtool and kubectl check the files where they are installed.
"""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quill.__main__ import build_parser
from quill.server.errors import REJECTION_REASONS
from quill.server.settings import Settings, check_exposure, read_settings
from quill.server.telemetry.metric_table import TABLE

PLACE = Path(__file__).resolve().parents[1] / "server" / "deploy" / "kubernetes"
FOLDERS = sorted(path.parent.name for path in PLACE.glob("*/kustomization.yaml"))
NAMES = {"app.kubernetes.io/name": "quill"}
SCRAPED = {"job", "pod", "le"}  # labels that aren't the server's own
Json = dict[str, Any]


@functools.cache
def documents(folder: str) -> dict[str, Json]:
    """A folder's documents, by kind and name."""
    kustomization = yaml.safe_load((PLACE / folder / "kustomization.yaml").read_text())
    found = {}
    for name in kustomization["resources"]:
        if name.endswith(".yaml"):
            for each in yaml.safe_load_all((PLACE / folder / name).read_text()):
                found[f"{each['kind']}/{each['metadata']['name']}"] = each
    return found


def pod() -> Json:
    spec: Json = documents("base")["Deployment/quill"]["spec"]["template"]["spec"]
    return spec


def container() -> Json:
    main: Json = pod()["containers"][0]
    return main


def settings() -> Settings:
    """With its variables as Kubernetes fills them in: whole cores."""
    resources = container()["resources"]
    given = {
        each["name"]: resources["requests"][each["valueFrom"]["resourceFieldRef"]["resource"][9:]]
        for each in container()["env"]
    }
    words = [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word)
             for word in container()["args"]]  # fmt: skip
    read = read_settings(build_parser().parse_args(["serve", *words]))
    check_exposure(read)
    return read


def rules() -> Json:
    spec: Json = documents("monitoring")["PrometheusRule/quill"]["spec"]
    return spec


@functools.cache
def dashboard() -> Json:
    content: Json = json.loads((PLACE / "monitoring" / "dashboard.json").read_text())
    return content


def queries() -> Iterator[str]:
    """Every expression for Prometheus."""
    yield documents("autoscaling")["ScaledObject/quill"]["spec"]["triggers"][0]["metadata"]["query"]
    for group in rules()["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["definition"] for each in dashboard()["templating"]["list"][1:])


def test_kustomizations_list_every_file() -> None:
    assert FOLDERS == ["autoscaling", "base", "bundle-image", "monitoring"]
    for folder in FOLDERS:
        content = yaml.safe_load((PLACE / folder / "kustomization.yaml").read_text())
        files = [file for each in content.get("configMapGenerator", []) for file in each["files"]]
        files += [each["path"] for each in content.get("patches", [])]
        named = {*content["resources"], *files, "kustomization.yaml"}
        found = {path.name for path in (PLACE / folder).iterdir()}
        assert {name for name in named if not name.startswith("../")} == found
        assert all((PLACE / folder / name).exists() for name in named)


def test_pod_serves_protected_and_has_time_to_drain_before_it_is_killed() -> None:
    found = settings()
    assert found.host == "0.0.0.0"
    assert found.tls is not None
    assert found.api_keys is not None
    _, pause = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert pod()["terminationGracePeriodSeconds"] > float(pause) + found.drain_timeout_s


def test_every_path_of_an_argument_is_mounted() -> None:
    volumes = {each["name"] for each in pod()["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container()["volumeMounts"]}
    assert set(mounts) == volumes
    for argument in container()["args"]:
        path = argument.rpartition("=")[2]
        if path.startswith("/"):
            assert any(path.startswith(f"{each}/") for each in mounts.values()), argument


def test_ports_are_the_servers_own() -> None:
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    found = settings()
    served = {"grpc": found.port, "metrics": found.metrics_ports[0], "http": found.http_ports[0]}
    assert ports == served
    for name in ("quill", "quill-http"):
        service = documents("base")[f"Service/{name}"]["spec"]
        assert service["selector"] == NAMES
        assert {each["targetPort"] for each in service["ports"]} <= set(ports)
    policy = documents("base")["NetworkPolicy/quill"]["spec"]
    opened = {each["port"] for rule in policy["ingress"] for each in rule["ports"]}
    assert opened == set(ports)


def test_probes_check_health_at_the_servers_ports() -> None:
    words = container()["startupProbe"]["exec"]["command"]
    parsed = build_parser().parse_args(words[1:])
    assert parsed.run == "quill.server.cli.operator:health"
    assert parsed.address == f"localhost:{settings().port}"
    for probe in ("readinessProbe", "livenessProbe"):
        assert container()[probe]["httpGet"] == {
            "path": "/health",
            "port": "http",
            "scheme": "HTTPS",
        }


def test_selectors_find_the_pods_and_the_service() -> None:
    base = documents("base")
    assert base["Deployment/quill"]["spec"]["template"]["metadata"]["labels"] == NAMES
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert base[f"{kind}/quill"]["spec"]["selector"]["matchLabels"] == NAMES
    assert base["NetworkPolicy/quill"]["spec"]["podSelector"]["matchLabels"] == NAMES
    monitor = documents("monitoring")["ServiceMonitor/quill"]["spec"]
    wanted = monitor["selector"]["matchLabels"]
    services = [each for each in base.values() if each["kind"] == "Service"]
    (service,) = [each for each in services if each["metadata"].get("labels") == wanted]
    assert service["spec"]["clusterIP"] == "None"
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}


def test_bundle_image_replaces_the_volume() -> None:
    patch = yaml.safe_load((PLACE / "bundle-image" / "deployment.yaml").read_text())
    changed = patch["spec"]["template"]["spec"]
    (volume,) = changed["volumes"]
    (first,) = changed["initContainers"]
    assert volume["name"] in {each["name"] for each in pod()["volumes"]}
    assert volume["persistentVolumeClaim"] is None
    (mount,) = first["volumeMounts"]
    assert {"name": mount["name"], "mountPath": mount["mountPath"], "readOnly": True} in (
        container()["volumeMounts"]
    )
    assert first["command"][-1] == container()["args"][0]


@pytest.mark.parametrize("left", [(), ("bundle",), ("bundle.new",), ("bundle", "bundle.new")])
def test_bundle_is_copied_whole_whatever_an_interruption_left(
    left: tuple[str, ...], tmp_path: Path
) -> None:
    patch = yaml.safe_load((PLACE / "bundle-image" / "deployment.yaml").read_text())
    (first,) = patch["spec"]["template"]["spec"]["initContainers"]
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "manifest.json").write_text("new")
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    *words, _ = (word.replace("/bundle", str(tmp_path / "image")) for word in first["command"])
    subprocess.run([*words, str(tmp_path / "bundle")], check=True)
    assert [path.name for path in (tmp_path / "bundle").iterdir()] == ["manifest.json"]
    assert not (tmp_path / "bundle.new").exists()


def test_threads_are_the_cores_of_the_request() -> None:
    assert settings().threads == int(container()["resources"]["requests"]["cpu"]) == 2


def test_scaling_threshold_is_seven_tenths_of_the_sequences_of_a_server() -> None:
    spec = documents("autoscaling")["ScaledObject/quill"]["spec"]
    assert f"Deployment/{spec['scaleTargetRef']['name']}" in documents("base")
    (trigger,) = spec["triggers"]
    max_num_seqs = settings().max_num_seqs
    assert max_num_seqs is not None
    assert trigger["metadata"]["threshold"] == str(round(0.7 * max_num_seqs))
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert spec["minReplicaCount"] == documents("base")["Deployment/quill"]["spec"]["replicas"]


def test_every_metric_of_an_expression_exists_with_its_labels() -> None:
    labels = {row.name: {*row.labels} for row in TABLE}
    expressions = list(queries())
    assert len(expressions) > 30
    for query in expressions:
        names = re.findall(r"quill_\w+", query)
        assert names or query.startswith("up{"), query  # Prometheus' own
        assert {_family(name) for name in names} <= set(labels), query
        for name, wanted in re.findall(r"(quill_\w+)\{(.*?)\}", query):
            assert set(re.findall(r"(\w+)=", wanted)) <= labels[_family(name)] | SCRAPED, query
        for grouped in re.findall(r"by \((.*?)\)", query):
            assert set(grouped.split(", ")) <= labels[_family(names[0])] | SCRAPED, query


def test_reasons_of_rejections_exist() -> None:
    for query in queries():
        for reasons in re.findall(r'reason=~"(.*?)"', query):
            assert set(reasons.split("|")) <= set(REJECTION_REASONS)


def _family(name: str) -> str:
    return re.sub(r"_(total|bucket)$", "", name)


def test_panels_use_every_variable() -> None:
    content = dashboard()
    variables = {each["name"] for each in content["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(content["panels"])))
    assert used - {"__rate_interval"} == variables


def test_every_field_is_in_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for each in documents("base").values():
        validate.validate(each, validate.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", ["autoscaling", "base", "monitoring"])
def test_kubectl_builds_every_folder(folder: str) -> None:
    command = ["kubectl", "kustomize", str(PLACE / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = {
        f"{each['kind']}/{each['metadata']['name']}" for each in yaml.safe_load_all(done.stdout)
    }
    assert built >= set(documents(folder))
