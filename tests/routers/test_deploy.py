"""The files in ``deploy/``: valid by their schemas, without a network, and consistent with the command they start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamapipe.cli import _parser
from llamapipe.cli.serve import _kv_events
from llamapipe.server.settings import ServerSettings

pytestmark = pytest.mark.routers

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="the schemas are not installed: nox -s routers"
)
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: nox -s routers")
DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES = ("1.30", "1.37")  # the oldest with preStop.sleep on by default, and a new one


def documents(path: Path) -> Iterator[dict[str, Any]]:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        yield dict(document)


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for path in MANIFESTS for one in documents(path) if one["kind"] == kind]
    return found


def container() -> dict[str, Any]:
    containers: list[dict[str, Any]] = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    return containers[0]


def parsed(arguments: list[str], tmp_path: Path) -> Any:
    """The command line as the command reads it; its model file exists here."""
    model = tmp_path / "model.gguf"
    model.touch()
    return _parser().parse_args([one.replace("/models/model.gguf", str(model)) for one in arguments])


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path, version: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_validator_finds_errors() -> None:
    wrong = of_kind("Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_the_compose_file_is_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_file_is_valid() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_the_commands_are_ones_that_the_command_takes(tmp_path: Path) -> None:
    args = parsed(container()["args"], tmp_path)
    assert (args.host, args.port, args.alias) == ("0.0.0.0", 8080, ["local"])
    options = _kv_events(args, ServerSettings())["kv_events"]
    assert (options.endpoint, options.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
    (compose,) = documents(DEPLOY / "compose.yaml")
    for name in ("server-1", "server-2"):
        args = parsed(compose["services"][name]["command"], tmp_path)
        assert (args.host, args.port) == ("0.0.0.0", 8080)
        assert f"http://{name}:{args.port}" in compose["services"]["router"]["command"]


def test_ports_probes_and_labels_fit_together() -> None:
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": 8080, "kv-events": 5557, "kv-replay": 5558}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container()[probe]["httpGet"] == {"path": "/health", "port": "http"}
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert of_kind("Service")["spec"]["selector"] == labels
    assert of_kind("Deployment")["spec"]["selector"]["matchLabels"] == labels
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert of_kind(kind)["spec"][field]["matchLabels"] == labels
    used = {port["port"] for rule in of_kind("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
    assert used == set(ports)
    assert of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "llamapipe"
