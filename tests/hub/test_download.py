"""Models of a hub on loopback: each in a process of its own, because huggingface_hub reads its settings at import."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.adapters import make_adapter
from support.gguf_models import tiny_model
from support.media_models import gemma3_projector
from support.run_script import environment, run_script
from support.small_hub import COMMIT, SmallHub, small_hub

import llamapipe as lp
from llamapipe import demo_model_path

pytest.importorskip("huggingface_hub")

REPO = "some/model"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallHub]:
    folder = tmp_path_factory.mktemp("hub")
    f16 = tiny_model(folder / "one.gguf").read_bytes()
    other = tiny_model(folder / "other.gguf", type_name="q8_0").read_bytes()
    files = {
        REPO: {"README.md": b"#", "m-F16.gguf": f16, "m-Q8_0.gguf": other, "mmproj-m.gguf": b"?"},
        "some/vision": {
            "m.gguf": demo_model_path().read_bytes(),
            "mmproj-m-F16.gguf": gemma3_projector(folder / "mmproj-m-F16.gguf").read_bytes(),
            "mmproj-m-BF16.gguf": gemma3_projector(folder / "other-BF16.gguf").read_bytes(),
        },
        "some/single": {"dir/only.gguf": f16},
        "some/lora": {
            "letters.gguf": demo_model_path().with_name("letters.gguf").read_bytes(),
            "invoked.gguf": make_adapter(
                folder / "invoked.gguf", folder / "one.gguf", invocation=[200]
            ).read_bytes(),
        },
    }
    with small_hub(files) as hub:
        yield hub


def settings(hub: SmallHub, home: Path, **more: str) -> dict[str, str]:
    """The variables that huggingface_hub reads."""
    return {**hub.variables(home), **more}


LOAD = """
import sys
import llamapipe as lp
repo, name, options = sys.argv[1], sys.argv[2] or None, eval(sys.argv[3])
try:
    with lp.Model.from_pretrained(repo, name, progress=False, **options) as model:
        print(model.path.name, model.n_vocab)
except Exception as e:
    print(type(e).__name__, e)
"""


def loaded(hub: SmallHub, home: Path, repo: str, name: str = "", options: str = "{}", **more: str) -> str:
    return run_script(LOAD, repo, name, options, env=settings(hub, home, **more)).strip()


LOAD_VISION = """
import llamapipe as lp
for mmproj in ("auto", True, "auto", False):
    with lp.Model.from_pretrained("some/vision", progress=False, mmproj=mmproj) as model:
        print(model.projector and model.projector.path.name)
with lp.Model.demo() as model:
    print(model.projector)
with lp.Model(lp.demo_model_path(), mmproj="hf:some/vision") as model:
    print(model.projector.path.name)
"""


def test_the_projector_of_a_repository_is_downloaded_if_it_is_asked_for(
    hub: SmallHub, tmp_path: Path
) -> None:
    printed = run_script(LOAD_VISION, env=settings(hub, tmp_path)).split()
    assert printed == ["None", *["mmproj-m-F16.gguf"] * 2, "None", "None", "mmproj-m-F16.gguf"]


LOAD_ADAPTER = """
import llamapipe as lp
with lp.Model.demo() as model, model.load_adapter("hf:some/lora/letters.gguf") as adapter:
    print(adapter, adapter.path.name)
"""


def test_an_adapter_is_downloaded(hub: SmallHub, tmp_path: Path) -> None:
    for _ in range(2):
        hub.requests.clear()
        printed = run_script(LOAD_ADAPTER, env=settings(hub, tmp_path)).strip()
        assert printed == "<Adapter 'letters' rank=4 n_pairs=28> letters.gguf"
    assert not [request for request in hub.requests if request.startswith("GET") and "resolve" in request]


LOOK_AT_LIST = """
import sys
from pathlib import Path
from llamapipe.cli._models_file import entries_of, read_facts
facts = {entry.name: read_facts({}, entry) for entry in entries_of([sys.argv[1]])}
print(facts["with"].n_bytes - facts["without"].n_bytes)
"""


def test_an_adapter_in_a_list_of_models_is_downloaded(hub: SmallHub, tmp_path: Path) -> None:
    """As on the command line, where ``--lora NAME=hf:…`` works."""
    lists = tmp_path / "models.toml"
    file = f"file = '{demo_model_path()}'\n"
    lora = 'lora = { letters = "hf:some/lora/letters.gguf" }\n'
    lists.write_text(f"[models.with]\n{file}{lora}[models.without]\n{file}")
    size = demo_model_path().with_name("letters.gguf").stat().st_size
    assert run_script(LOOK_AT_LIST, lists, env=settings(hub, tmp_path)) == f"{size}\n"


FIND_ACTIVATED = """
from llamapipe.ray import EngineSpec
from llamapipe.ray._spec import activated_loras
files = {name: f"hf:some/lora/{name}.gguf" for name in ("letters", "invoked", "missing")}
print(activated_loras(EngineSpec("model.gguf", adapters=files)))
"""


def test_an_activated_lora_of_the_hub_is_known_before_an_engine_loads_it(
    hub: SmallHub, tmp_path: Path
) -> None:
    assert run_script(FIND_ACTIVATED, env=settings(hub, tmp_path)) == "['invoked']\n"


def test_a_model_is_downloaded_once(hub: SmallHub, tmp_path: Path) -> None:
    assert loaded(hub, tmp_path, REPO, "*Q8_0.gguf") == "m-Q8_0.gguf 512"
    hub.requests.clear()
    assert loaded(hub, tmp_path, REPO, "*Q8_0.gguf", f"dict(revision={COMMIT!r})") == "m-Q8_0.gguf 512"
    assert not [request for request in hub.requests if request.startswith("GET") and "resolve" in request]
    hub.requests.clear()
    for options, more in (("dict(local_files_only=True)", {}), ("{}", {"HF_HUB_OFFLINE": "1"})):
        assert loaded(hub, tmp_path, REPO, "*Q8_0.gguf", options, **more) == "m-Q8_0.gguf 512"
    assert not hub.requests


LOAD_BY_NAME = """
import sys, llamapipe as lp
with lp.Model(sys.argv[1]) as model:
    print(model.path.name)
"""


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (f"hf:{REPO}/m-F16.gguf", "m-F16.gguf"),
        (f"hf:{REPO}:Q8_0", "m-Q8_0.gguf"),
        ("hf:some/single", "only.gguf"),
    ],
)
def test_a_model_is_named_as_on_the_command_line(hub: SmallHub, tmp_path: Path, name: str, file: str) -> None:
    assert run_script(LOAD_BY_NAME, name, env=settings(hub, tmp_path)) == f"{file}\n"


def test_a_name_of_the_hub_that_is_none() -> None:
    with pytest.raises(ValueError, match="hf:OWNER/REPO"):
        lp.Model("hf:model")


def test_the_only_model_of_a_repository(hub: SmallHub, tmp_path: Path) -> None:
    assert loaded(hub, tmp_path, "some/single") == "only.gguf 512"


@pytest.mark.parametrize(
    ("repo", "name", "options", "message"),
    [
        (REPO, "", "{}", "ModelLoadError some/model has 2 models; name one of m-F16.gguf, m-Q8_0.gguf"),
        (REPO, "*Q2*", "{}", "ModelLoadError some/model has no GGUF file that matches '*Q2*'; it has m-F16"),
        ("no/body", "", "{}", "ModelLoadError no/body: there is no such repository, or it is private"),
        (
            REPO,
            "m-F16.gguf",
            "dict(revision='v9')",
            "ModelLoadError some/model@v9: there is no such revision",
        ),
        (
            REPO,
            "",
            "dict(local_files_only=True)",
            "ModelLoadError some/model is not in the cache of this machine",
        ),
        ("a/b/c", "", "{}", "ValueError 'a/b/c' is not the name of a repository"),
        (REPO, "", "dict(n_gpu_layers='x')", "ModelLoadError some/model has 2 models"),
        (REPO, "m-F16.gguf", "dict(n_gpu_layers='x')", "TypeError n_gpu_layers"),
        (REPO, "m-F16.gguf", "dict(revision=5)", "TypeError revision must be a str, not int"),
    ],
)
def test_what_cannot_be_loaded(
    hub: SmallHub, tmp_path: Path, repo: str, name: str, options: str, message: str
) -> None:
    assert loaded(hub, tmp_path, repo, name, options).startswith(message)


def test_a_download_that_is_cut_continues(hub: SmallHub, tmp_path: Path) -> None:
    """New versions of huggingface_hub ask again by themselves; with old ones the next call does."""
    hub.cut_after = 100_000
    program = f"import logging; logging.disable(logging.WARNING)\n{LOAD}"
    out = run_script(program, REPO, "m-F16.gguf", "{}", env=settings(hub, tmp_path))
    if out.startswith("ModelLoadError some/model: the hub did not answer as expected"):
        out = run_script(program, REPO, "m-F16.gguf", "{}", env=settings(hub, tmp_path))
    assert out.strip() == "m-F16.gguf 512"
    assert hub.cut_after is None


def test_the_command_line_takes_names_of_the_hub(hub: SmallHub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llamapipe", "generate", "--max-tokens", "2", "Hello", "-m"]
    env = environment(settings(hub, tmp_path, HF_HUB_DISABLE_PROGRESS_BARS="1"))
    done = subprocess.run(
        [*command, "hf:some/single"], env=env, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    done = subprocess.run(
        [*command, f"hf:{REPO}:q8_0"], env=env, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    done = subprocess.run([*command, f"hf:{REPO}"], env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    assert b"has 2 models; name one of m-F16.gguf, m-Q8_0.gguf" in done.stderr
    assert os.listdir(tmp_path)  # noqa: PTH208


def test_a_hub_that_cannot_be_reached(hub: SmallHub, tmp_path: Path) -> None:
    """It is asked once, and the cache has what was downloaded before."""
    command = [sys.executable, "-m", "llamapipe", "generate", "--max-tokens", "2", "Hello", "-m"]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]  # nobody listens there from now on
    away = {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}

    def generate() -> subprocess.CompletedProcess[str]:
        env = environment(settings(hub, tmp_path, **away))
        words = [*command, "hf:some/single"]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=120)

    done = generate()
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"llamapipe: some/single: {away['HF_ENDPOINT']} cannot be reached: ")
    assert loaded(hub, tmp_path, "some/single") == "only.gguf 512"
    done = generate()
    assert (done.returncode, done.stderr) == (
        0,
        "the hub cannot be reached; using only.gguf from the cache\n",
    )


QUIET = "import logging\nlogging.disable(logging.WARNING)\n"
AT_ONCE = "import time\ntime.sleep = lambda s: None  # the library asks six times\n"


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>Log in</html>"), (200, b"null"), (200, b'[{"type": "file"}]')]
)
def test_what_answers_is_no_hub(hub: SmallHub, tmp_path: Path, status: int, body: bytes) -> None:
    """As in a network that asks for a login. The cache has what was downloaded before."""
    hub.instead = status, body
    try:
        message = f"ModelLoadError some/single: {hub.url} does not answer as a hub does: check HF_ENDPOINT"
        assert loaded(hub, tmp_path, "some/single").startswith(message)
        hub.instead = None
        assert loaded(hub, tmp_path, "some/single") == "only.gguf 512"
        hub.instead = status, body
        out = run_script(f"{QUIET}{LOAD}", "some/single", "", "{}", env=settings(hub, tmp_path))
        assert out == "only.gguf 512\n"
    finally:
        hub.instead = None


def test_a_hub_that_is_out_of_order(hub: SmallHub, tmp_path: Path) -> None:
    assert loaded(hub, tmp_path, "some/single") == "only.gguf 512"
    program = f"{QUIET}{AT_ONCE}{LOAD}"
    try:
        for status, expected in (
            (503, "only.gguf 512"),
            (403, "ModelLoadError some/single: the hub did not"),
        ):
            hub.instead = status, b"{}"
            out = run_script(program, "some/single", "", "{}", env=settings(hub, tmp_path))
            assert expected in out
    finally:
        hub.instead = None


WATCH = """
import sys
from llamapipe.hub import model_file

class Stop(Exception):
    pass

def watch(name, n_bytes, n_here):
    print(name, n_here == n_bytes)
    if sys.argv[1] == "stop":
        raise Stop

try:
    print(model_file("some/model", ":F16", progress=False, watch=watch).name)
except Stop:
    print("stopped")
"""


def test_a_download_is_watched_and_can_be_stopped(hub: SmallHub, tmp_path: Path) -> None:
    stopped, done = (
        run_script(WATCH, how, env=settings(hub, tmp_path)).splitlines() for how in ("stop", "continue")
    )
    assert (stopped[-1], done[-1]) == ("stopped", "m-F16.gguf")
    assert "m-F16.gguf True" in done


COMMAND = """
import sys
from llamapipe.cli import main
sys.stderr = sys.stdout
print("status", main(sys.argv[1:]))
"""


def test_a_file_that_cannot_be_written(hub: SmallHub, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()  # where a folder is needed
    out = loaded(hub, tmp_path, "some/single")
    assert out.startswith("ModelLoadError some/single: the file could not be written ([Errno")
    assert out.endswith(f"{tmp_path / 'hub'} must be writable and have room, or set HF_HOME")


BOTH = """
from llamapipe.hub import cached_models, delete, model_file
names = ["m.gguf", "m-00001-of-00002.gguf"]
for name in names:
    model_file("some/both", name, progress=False)
print([(model.path.name, model.size_bytes) for model in cached_models()])
print([path.name for path in delete("some/both", "m.gguf")], [model.path.name for model in cached_models()])
print([path.name for path in delete("some/both", names[1])], cached_models())
"""


def test_a_model_in_one_file_and_in_parts_are_two(tmp_path: Path) -> None:
    parts = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    with small_hub({"some/both": {"m.gguf": b"12345", parts[0]: b"6", parts[1]: b"78"}}) as hub:
        printed = run_script(BOTH, env=settings(hub, tmp_path)).splitlines()
    assert printed == [
        f"[('{parts[0]}', 3), ('m.gguf', 5)]",
        f"['m.gguf'] ['{parts[0]}']",
        f"{parts} []",
    ]


def test_pull_and_rm(hub: SmallHub, tmp_path: Path) -> None:
    def said(*arguments: str) -> list[str]:
        return run_script(COMMAND, *arguments, env=settings(hub, tmp_path)).splitlines()

    pulled = said("pull", "hf.co/some/model:Q8_0")
    path = Path(pulled[0])
    assert path.name == "m-Q8_0.gguf" and path.is_file() and pulled[1:] == ["status 0"]
    assert said("rm", "hf:some/model/m-Q8_0.gguf") == [str(path), "status 0"]
    assert not path.exists() and not [file for file in tmp_path.rglob("blobs/*") if file.is_file()]
    message, status = said("rm", "hf:some/model/m-Q8_0.gguf")
    assert "has no GGUF file that matches" in message and status == "status 1"
    for name in ("llama3.2", "hf:a"):
        *_, message, status = said("pull", name)
        assert "names no model on the hub" in message and status == "status 2"


CUT = """
import logging, os, sys
from llamapipe.errors import ModelLoadError
import llamapipe as lp

logging.basicConfig(format="%(message)s", stream=sys.stdout)

def load(**options):
    with lp.Model.from_pretrained(sys.argv[1], "*F16.gguf", progress=False, **options) as model:
        return model.path

path = load()
size = path.stat().st_size
os.truncate(path, size - 1000)
try:
    load(local_files_only=True)
except ModelLoadError as e:
    print(e)
print(load() == path, path.stat().st_size == size)
"""


def test_a_cut_file_of_the_cache_is_downloaded_again(hub: SmallHub, tmp_path: Path) -> None:
    """Such as one that a full disk or a copy cut. Without the hub, the error says what to do."""
    error, warning, whole = run_script(CUT, REPO, env=settings(hub, tmp_path)).splitlines()
    assert error.startswith(str(tmp_path))
    assert error.endswith("; llamapipe pull hf:some/model/m-F16.gguf downloads it again")
    assert warning.endswith(": downloading it again")
    assert whole == "True True"
