"""The line that an installed llamapipe adds to Python's start, and what it loads; needs no harness."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import llamapipe

FOLDER = Path(llamapipe.__file__).parent
SOURCE = Path(__file__).resolve().parents[2] / "llamapipe" / "lm_eval"
LINE = SOURCE / "llamapipe-lm-eval.pth"

HARNESS = {
    "lm_eval/__init__.py": "",
    "lm_eval/api/__init__.py": "",
    "lm_eval/api/registry.py": """
class Registry(dict):
    def register(self, name, target):
        self[name] = target
model_registry = Registry()
""",
    "lm_eval/models/__init__.py": """
from lm_eval.api.registry import model_registry
model_registry.register("hf", target="lm_eval.models.huggingface:HFLM")
""",
    "lm_eval/__main__.py": """
import sys
import lm_eval.models
from lm_eval.api import registry
print(sorted(getattr(registry, "model_registry", {}).items()))
print(sorted({"numpy", "llamapipe"} & sys.modules.keys()))
""",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages of an environment: a harness that only has what we use, our line, and what it loads of ours."""
    venv.create(tmp_path / "env")
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for name, text in HARNESS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / LINE.name).write_text(LINE.read_text())
    package = site / "llamapipe"
    (package / "lm_eval").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not at the start')")
    (package / "lm_eval" / "startup.py").write_text((SOURCE / "startup.py").read_text())
    return site


def run(site: Path, *arguments: str) -> tuple[str, str]:
    """What the environment's Python writes."""
    python = site.parents[2] / "bin" / "python"
    done = subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=site.parents[2],
        env={"PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


WITH_OURS = [
    "('hf', 'lm_eval.models.huggingface:HFLM')",
    "('llamapipe', 'llamapipe.lm_eval.model:LlamapipeLM')",
]


def test_it_is_one_line_that_python_runs() -> None:
    lines = LINE.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import sys;")


def test_the_harness_knows_the_model(site: Path) -> None:
    out, err = run(site, "-m", "lm_eval", "--model", "llamapipe")
    assert out == f"[{', '.join(WITH_OURS)}]\n[]\n"
    assert not err


@pytest.mark.parametrize("name", ["lm_eval", "lm-eval"])
def test_the_harness_knows_the_model_as_a_command(site: Path, name: str) -> None:
    script = site.parents[2] / "bin" / name
    script.write_text(HARNESS["lm_eval/__main__.py"])
    assert run(site, str(script), "--model", "llamapipe")[0] == f"[{', '.join(WITH_OURS)}]\n[]\n"


def test_other_programs_are_left_alone(site: Path) -> None:
    program = "import sys; print(len(sys.meta_path)); import lm_eval.models; from lm_eval.api import registry as r; "
    program += "print(*r.model_registry)"
    (site / LINE.name).unlink()
    without = run(site, "-c", program)
    (site / LINE.name).write_text(LINE.read_text())
    assert run(site, "-c", program) == without
    assert without[0].endswith("\nhf\n")


def test_it_costs_microseconds() -> None:
    program = (
        "import sys, time\n"
        "code = compile(sys.stdin.read(), 'line', 'exec')\n"
        "known = set(sys.modules)\n"
        "def once():\n"
        "    begin = time.perf_counter()\n"
        "    exec(code)\n"
        "    return time.perf_counter() - begin\n"
        "print(min(once() for _ in range(100)), set(sys.modules) - known)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=LINE.read_text(), capture_output=True, text=True, check=True
    )
    seconds, new = done.stdout.split(maxsplit=1)
    assert float(seconds) < 1e-4
    assert new == "set()\n"


@pytest.mark.parametrize("damage", ["no package", "no file", "bad file"])
def test_nothing_is_said_when_it_fails(site: Path, damage: str) -> None:
    file = site / "llamapipe" / "lm_eval" / "startup.py"
    if damage == "no package":
        (site / "llamapipe").rename(site / "elsewhere")
    elif damage == "no file":
        file.unlink()
    else:
        file.write_text("this is no Python")
    out, err = run(site, "-m", "lm_eval")
    assert (out, err) == (f"[{WITH_OURS[0]}]\n[]\n", "")


def test_a_harness_with_another_registry_still_runs(site: Path) -> None:
    (site / "lm_eval" / "api" / "registry.py").write_text("")
    (site / "lm_eval" / "models" / "__init__.py").write_text("")
    out, err = run(site, "-m", "lm_eval")
    assert out == "[]\n[]\n"
    assert "python -m llamapipe.lm_eval" in err


def test_without_the_harness_the_error_says_what_to_install() -> None:
    program = "import sys; sys.modules['lm_eval'] = None; import llamapipe.lm_eval"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=FOLDER.parent
    )
    assert re.search(r'ImportError: .* pip install "llamapipe\[lm-eval\]"', done.stderr)
