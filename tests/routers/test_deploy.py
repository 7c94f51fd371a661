"""The files in ``deploy/`` and the workflows: valid, without a network, and consistent with what they start."""

from __future__ import annotations

import re
import shlex
import shutil
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
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "llamapipe.service"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES = ("1.30", "1.37")  # the oldest with preStop.sleep on by default, and a new one


def documents(path: Path) -> Iterator[dict[str, Any]]:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        yield dict(document)


def of_kind(kind: str) -> dict[str, Any]:
    (manifest,) = [document for path in MANIFESTS for document in documents(path) if document["kind"] == kind]
    return manifest


def container() -> dict[str, Any]:
    containers: list[dict[str, Any]] = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    return containers[0]


def parsed(arguments: list[str], tmp_path: Path) -> Any:
    """The command line as the command reads it; its model file exists here."""
    model = tmp_path / "model.gguf"
    model.touch()
    return _parser().parse_args(
        [argument.replace("/models/model.gguf", str(model)) for argument in arguments]
    )


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


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
needs_workflows = pytest.mark.skipif(not WORKFLOWS, reason="the source archive has no workflows")


def problems_of(*workflows: Path) -> str:
    """What zizmor says, without asking other hosts; empty if there is nothing."""
    zizmor = str(Path(sys.executable).parent / "zizmor")
    command = [zizmor, "--offline", "--quiet", "--format", "plain", *map(str, workflows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_workflows
def test_workflows_are_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_workflows
def test_workflows_trust_nothing_that_may_change(tmp_path: Path) -> None:
    assert problems_of(*WORKFLOWS) == ""
    wrong = tmp_path / "release.yml"
    text = WORKFLOWS[-1].read_text(encoding="utf-8")
    wrong.write_text(re.sub(r"actions/checkout@\w+", "actions/checkout@v4", text, count=1))
    assert "unpinned-uses" in problems_of(wrong)


@needs_workflows
def test_jobs_hand_on_what_others_take() -> None:
    for path in WORKFLOWS:
        (workflow,) = documents(path)
        artifacts: dict[str, set[str]] = {}
        for name, job in workflow["jobs"].items():
            needed = job.get("needs", [])
            before = set().union(
                *(artifacts[other] for other in ([needed] if isinstance(needed, str) else needed))
            )
            entries = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
            artifacts[name] = set()
            for step in job["steps"]:
                kind, artifact = step.get("uses", ""), step.get("with", {}).get("name", "")
                if "/upload-artifact@" in kind:
                    for entry in entries:
                        artifacts[name].add(artifact.replace("${{ matrix.name }}", entry.get("name", "")))
                elif "/download-artifact@" in kind and artifact:
                    assert artifact in before, f"{path.name}: {name} takes {artifact}"


def unit_command() -> list[str]:
    lines = UNIT.read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = re.findall(r"^ExecStart=(.*)$", lines, re.MULTILINE)
    return shlex.split(command)


def test_the_unit_is_valid_and_limits_what_the_service_may_do(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    # It looks for the program, which is another one here.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(unit_command()[0], sys.executable))
    for arguments in (["verify", "--recursive-errors=no"], ["security", "--offline=yes", "--threshold=15"]):
        done = subprocess.run([analyze, *arguments, str(unit)], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and (arguments[0] != "verify" or not done.stderr), (
            done.stdout + done.stderr
        )


def test_the_commands_are_ones_that_the_command_takes(tmp_path: Path) -> None:
    args = parsed(container()["args"], tmp_path)
    assert (args.host, args.port, args.alias) == ("0.0.0.0", 8080, ["local"])
    options = _kv_events(args, ServerSettings())["kv_events"]
    assert (options.endpoint, options.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
    program, *arguments = unit_command()
    assert program.endswith("/llamapipe")
    model = "/srv/models/model.gguf"
    args = parsed(
        ["/models/model.gguf" if argument == model else argument for argument in arguments], tmp_path
    )
    assert str(args.api_key_file) == "${CREDENTIALS_DIRECTORY}/api-keys"
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
