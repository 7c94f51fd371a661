"""OpenAI's own tests of its client, from the source archive of the package, against the server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.served import demo_server

SOURCE = os.environ.get("LLAMAPIPE_OPENAI_SOURCE")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(SOURCE is None, reason="needs openai's source archive: nox -s clients"),
]


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    with demo_server(folder, "gpt-6-astra", "gpt-3.5-turbo-instruct", "model") as url:
        yield url


@pytest.mark.parametrize(
    ("file", "chosen", "n"),
    [
        ("chat/test_completions.py", "create", 40),
        ("test_completions.py", "create", 40),
        # In its strict mode the client refuses the base64 that it asked for.
        ("test_embeddings.py", "loose", 8),
        # And more with some of its optional packages. No server here deletes a model because a client asks.
        ("test_models.py", "not delete", 20),
    ],
)
def test_all_tests_of_a_resource_pass(
    server_url: str, tmp_path: Path, file: str, chosen: str, n: int
) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-W", "default", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, "-k", chosen, f"tests/api_resources/{file}"],
        cwd=str(SOURCE),
        env={**os.environ, "TEST_API_BASE_URL": f"{server_url}/v1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    assert counts.pop("tests") >= n, done.stdout
    assert not any(counts.values()), done.stdout
