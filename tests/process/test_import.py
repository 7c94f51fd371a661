"""What importing llamapipe does: nothing but define names, and those only that a program uses."""

from __future__ import annotations

import ast
import pickle
import shutil
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from support.run_script import run_script

import llamapipe


def test_import_has_no_side_effects() -> None:
    out = run_script(
        """
import atexit, logging, os, signal, threading, warnings
import numpy, cffi  # what llamapipe needs may do what it likes

def state():
    names = ("", "llamapipe", "llamapipe.native")
    loggers = {name: logging.getLogger(name) for name in names}
    return {
        "threads": threading.active_count(),
        "exit hooks": atexit._ncallbacks(),
        "signal handlers": [signal.getsignal(s) for s in signal.valid_signals()],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "warning filters": list(warnings.filters),
        "log handlers": {name: list(logger.handlers) for name, logger in loggers.items()},
        "log levels": {name: logger.level for name, logger in loggers.items()},
        "open files": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None,
    }

before = state()
from llamapipe import *
after = state()
say([name for name in before if before[name] != after[name]])
"""
    )
    assert out == "[]\n"


def test_import_loads_nothing_native_and_no_event_loop() -> None:
    out = run_script(
        """
from llamapipe import *
unwanted = ("llamapipe.native._native", "asyncio", "llguidance", "llama_cpp", "torch")
say([name for name in unwanted if name in sys.modules])
try:
    with open("/proc/self/maps") as maps:
        say([line for line in maps if "ggml" in line or "llamapipe" in line])
except FileNotFoundError:
    say([])
"""
    )
    assert out == "[]\n[]\n"


def test_import_loads_only_the_errors() -> None:
    """A program that names an engine, or only a part of the library, does not wait for the rest."""
    program = """
import llamapipe
say(sorted(name for name in sys.modules if name.startswith("llamapipe.")), "numpy" in sys.modules)
llamapipe.SamplingParams, llamapipe.Model
say("llamapipe.engine" in sys.modules)
import numpy
with_numpy = set(sys.modules)  # which differ by its version
llamapipe.Engine
unwanted = (
    "llamapipe.cli", "llamapipe.compat", "llamapipe.hub", "llamapipe.jobs", "llamapipe.server",
    "llamapipe.structured.compile", "llamapipe.telemetry",
    "asyncio", "decimal", "jinja2", "jsonschema", "llguidance", "PIL", "shutil", "socket", "ssl", "starlette",
    "tempfile", "tqdm",
)
say([name for name in unwanted if name in sys.modules.keys() - with_numpy])
"""
    assert run_script(program) == "['llamapipe.errors'] False\nFalse\n[]\n"


def test_help_of_the_program_loads_no_command() -> None:
    program = """
from llamapipe.cli import main
for argument in ("--version", "--help"):
    main([argument])
say(sorted(name for name in sys.modules if name.startswith("llamapipe.cli.")), "numpy" in sys.modules)
"""
    assert run_script(program).splitlines()[-1] == "['llamapipe.cli.parser'] False"


def test_import_warns_of_nothing() -> None:
    run_script("from llamapipe import *", flags=("-W", "error", "-bb"))


def test_every_public_name_is_there() -> None:
    for name in llamapipe.__all__:
        assert getattr(llamapipe, name) is not None
    assert len(set(llamapipe.__all__)) == len(llamapipe.__all__)


def test_names_are_imported_from_where_type_checkers_are_told() -> None:
    tree = ast.parse(Path(llamapipe.__file__).read_text(encoding="utf-8"))
    blocks = (
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    told = {alias.name: f"{node.module}" for node in imports for alias in node.names}
    names = set(llamapipe.__all__) - {"__version__", "errors"}
    assert told.keys() == names
    for name in names:
        value = getattr(llamapipe, name)
        assert getattr(import_module(told[name]), name) is value, name
        assert (
            pickle.loads(pickle.dumps(value)) is value
            if not isinstance(value, ModuleType)
            else name in ("lowlevel", "telemetry", "types")
        )


def test_everything_is_imported_with_a_star() -> None:
    out = run_script("from llamapipe import *; say(Engine.__name__, errors.__name__, telemetry.__name__)")
    assert out == "Engine llamapipe.errors llamapipe.telemetry\n"


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """A folder with a copy of the package as it is before ``build_native.py`` ran."""
    package = Path(llamapipe.__file__).parent
    left_out = shutil.ignore_patterns("_native*", "lib", "__pycache__", "*.gguf")
    shutil.copytree(package, tmp_path / "llamapipe", ignore=left_out)
    return tmp_path


def test_without_the_native_module_the_first_use_says_how_to_build_it(unbuilt: Path) -> None:
    program = """
sys.path.insert(0, sys.argv[1])
import llamapipe
say(llamapipe.__file__)
for _ in range(2):
    try:
        llamapipe.devices()
    except llamapipe.errors.BackendError as e:
        say(e)
"""
    where, *messages = run_script(program, unbuilt).splitlines()
    assert Path(where).is_relative_to(unbuilt)
    assert len(messages) == 2
    for message in messages:
        # The second one if llamapipe is installed, too, so that the unbuilt tree shadows it.
        assert "native module cannot be loaded" in message or "without a native module" in message
        assert "python build_native.py --backend cpu" in message
