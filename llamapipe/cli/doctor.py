"""``llamapipe doctor``: checks versions, build, devices and a model's file, and prints a fix for every problem.

Code that loads native libraries runs in a child process (``run_probes``), because a library for another processor kills
the process that loads it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe.cli._model_file import Finding, findings_of, look_at, suggestion
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.options import MODEL_HELP, model_path
from llamapipe.errors import LlamapipeError
from llamapipe.fleet.command import interpreter
from llamapipe.host.cores import usable_cores
from llamapipe.host.cpu_load import free_cores, has_run_delay
from llamapipe.llama.kv_memory import kv_bytes
from llamapipe.native.backend_packages import installed_packages
from llamapipe.native.load import REBUILD, backends_not_loaded, build_info, missing_cpu_features, native
from llamapipe.ollama_models import model_of

DESCRIPTION = (
    "Check the installation: versions, native build, devices and the bundled model. "
    "Prints a fix for every problem found and exits with status 1 if there is one. With -m, also tell what a model "
    "is, how many requests at which context fit into the memory, and how to serve it; no weights are loaded."
)
_PROBE_LIMIT_S = 120
_LOOK_S = 0.2  # how long the machine's load is measured
_DRIVERS = {
    "cuda": "install NVIDIA's driver; `nvidia-smi` lists its devices",
    "vulkan": "install the Vulkan loader and the GPU's driver (on Debian: libvulkan1, mesa-vulkan-drivers); "
    "`vulkaninfo --summary` lists devices; a software device is used only with GGML_VK_VISIBLE_DEVICES=0",
}
# The child gets the parent's search path: a source tree in the current folder must not shadow the installed package.
_PROBE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from llamapipe.cli.doctor import run_probes; sys.exit(run_probes(sys.argv[2:]))"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "-m",
        "--model",
        type=_read_model_name,
        metavar="FILE",
        help=MODEL_HELP.removesuffix(" (default)"),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _read_model_name(text: str) -> tuple[str, Path]:
    path = model_path(text)
    stored = model_of(path)
    return text, path if stored is None else stored[0]


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    build = build_info()
    name, file = args.model or ("", None)
    results = _probe([] if file is None else [str(file)])
    about_model = results.pop(f"model {file}", None)
    findings = [*_versions(), *_build(build), *_packages(build, results), *_probe_findings(results)]
    model = [] if about_model is None else [*_of_model(about_model, name)]
    ok = all(finding.ok for finding in (*findings, *model))
    if args.json:
        report = {
            "ok": ok,
            "findings": [asdict(finding) for finding in (*findings, *model)],
            "build": build,
            "devices": results.get("devices", {}).get("devices", []),
        }
        if about_model is not None and about_model["ok"]:
            facts = {key: value for key, value in about_model.items() if key not in ("name", "ok")}
            report["model"] = facts | {"command": suggestion(about_model, name)}
        print(json.dumps(report, indent=2))
    else:
        _show(Terminal(sys.stdout), findings, model)
    return 0 if ok else 1


def _of_model(about: dict[str, Any], name: str) -> Iterator[Finding]:
    if not about["ok"]:
        yield Finding("model", False, about["error"])
    else:
        yield from findings_of(about, name)


def _versions() -> Iterator[Finding]:
    yield Finding("llamapipe", True, f"{lp.__version__} in {Path(lp.__file__).parent}")
    yield Finding("python", True, f"{platform.python_version()} on {platform.platform()}")
    yield from (_package(name) for name in ("numpy", "cffi"))
    yield Finding("processor", True, f"{usable_cores()} of {os.cpu_count()} cores available to this process")
    yield Finding("compute threads", True, _threads())


def _threads() -> str:
    """Return, in words, how many threads engines would now compute with on this machine."""
    n = usable_cores()
    if n == 1:
        return "1: there is one core"
    free = free_cores(_LOOK_S)
    source = "run delays" if has_run_delay() else "step times"
    now = "" if free is None else f"; {free:.1f} cores are free now"
    return f"1 to {n}, chosen by {source}{now}"


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", f"pip install {name}")


def _build(build: dict[str, Any]) -> Iterator[Finding]:
    if not build:
        yield Finding("build", False, "no record of a native build", REBUILD)
        return
    backends = ", ".join(build.get("backends", []))
    parts = (backends, build.get("date", "?"), build.get("compiler", "?"), build.get("flags", ""))
    yield Finding(
        "build",
        True,
        "; ".join(part for part in parts if part),
    )
    yield _cpu_features(build)
    yield Finding(
        "llama.cpp",
        True,
        f"{build.get('llama_cpp_commit', '?')[:9]} from {build.get('llama_cpp_source', '?')}",
    )


def _cpu_features(build: dict[str, Any]) -> Finding:
    """Name the processor features that the build requires."""
    if missing := missing_cpu_features(build):
        detail = f"built for another processor: this one lacks {', '.join(missing)}"
        return Finding("CPU features", False, detail, REBUILD)
    if build.get("cpu_all_variants"):
        return Finding("CPU features", True, "chosen when the library is loaded")
    required = build.get("cpu_features") or ["not recorded"]
    return Finding("CPU features", True, " ".join(map(str, required)))


def _packages(build: dict[str, Any], results: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Name the installed backend packages, and say whether they are used."""
    module = results.get("native module", {})
    devices = results.get("devices", {}).get("devices")
    for package in installed_packages():
        name, about = package.name, f"{package.version}, llama.cpp {package.commit}, in {package.folder}"
        if package.backend in build.get("backends", ()):
            yield Finding(name, True, f"{about}; not used: this build contains the backend")
        elif problem := package.problem(build):
            detail, _, fix = problem.partition("; ")
            yield Finding(name, False, detail, fix)
        elif reason := module.get("not_loaded", {}).get(package.backend):
            yield Finding(name, False, f"{about}; not loaded: {reason}", _DRIVERS[package.backend])
        elif devices is not None and not any(
            device["backend"].lower() == package.backend for device in devices
        ):
            yield Finding(name, False, f"{about}; loaded, but found no device", _DRIVERS[package.backend])
        else:
            yield Finding(name, True, about)


def _probe(files: list[str]) -> dict[str, dict[str, Any]]:
    """Run the probes in a child process, then look at model files.

    Return the results by name, up to the first failure.
    """
    command = [*interpreter(), "-c", _PROBE, json.dumps(sys.path), *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=_PROBE_LIMIT_S)
            trouble = _ending(process.returncode, errors)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            trouble = f"no answer after {_PROBE_LIMIT_S} s"
    results: dict[str, dict[str, Any]] = {}
    for line in filter(lambda text: text.startswith("{"), output.splitlines()):
        result = json.loads(line)
        results[result["name"]] = result
    for result in results.values():
        if "ok" not in result:  # the probe started and did not finish
            result.update(ok=False, error=trouble)
    return results or {"native module": {"ok": False, "error": trouble}}


_ILLEGAL_INSTRUCTION = 0xC000001D  # the exit status on Windows after an illegal instruction


def _ending(status: int, errors: str) -> str:
    """Describe the end of a probe process that did not report its own failure."""
    if status in (-signal.SIGILL, _ILLEGAL_INSTRUCTION):
        return "the probe was killed by SIGILL: the library was built for another processor"
    if status < 0:
        return f"the probe was killed by {signal.Signals(-status).name}"
    return (errors.strip().splitlines() or [f"the probe exited with status {status}"])[-1]


def _probe_findings(results: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    for name, result in results.items():
        if not result["ok"]:
            yield Finding(name, False, result["error"], REBUILD)
        elif name == "devices":
            yield from (_device(device) for device in result["devices"])
        elif name == "demo model":
            times = f"loaded in {result['load_s']:.2f} s, {result['n_tokens']} tokens in {result['generate_s']:.2f} s"
            yield Finding(name, True, f"{result['path']}: {times}")
            if result["kv_bytes"] is not None:
                size = f"{result['kv_bytes'] / 2**20:.1f} MiB for {result['n_cells']} cells"
                yield Finding(
                    "KV cache", True, f"{size}, {result['n_seq_max']} requests (engine with default options)"
                )
        else:
            yield Finding(name, True, result["file"])
            yield Finding("kernels", True, _kernels(result["kernels"]))


def _kernels(kernels: dict[str, str | None]) -> str:
    """Return the name of the kernels that compute matrix products on the CPU."""
    if kernels["level"] is None:
        return f"ggml's; llamapipe's own are not used: {kernels['problem']}"
    return f"llamapipe's for {kernels['level']}, ggml's for other types of weights"


def _device(device: dict[str, Any]) -> Finding:
    total, free = device["memory_total"] / 2**30, device["memory_free"] / 2**30
    memory = f", {total:.1f} GiB, {free:.1f} free" if device["memory_total"] else ""
    can = [name.replace("_", " ") for name in ("async_compute", "events", "host_buffer") if device.get(name)]
    about = f"{device['description']} ({device['backend']}{memory}{''.join(f', {name}' for name in can)})"
    return Finding(f"device {device['name']}", True, about)


def _show(terminal: Terminal, installation: list[Finding], model: list[Finding]) -> None:
    findings = installation + model
    width = max(len(finding.name) for finding in findings)
    good = terminal.style(terminal.symbol("✓"), "green")
    bad = terminal.style(terminal.symbol("■"), "red")
    for part in filter(None, (installation, model)):
        if part is model:
            terminal.line()
        for finding in part:
            terminal.line(f"{good if finding.ok else bad} {finding.name.ljust(width)}  {finding.detail}")
            if finding.fix:
                word = "note" if finding.ok else "fix"
                terminal.line(f"  {' ' * width}  " + terminal.style(f"{word}: {finding.fix}", "yellow"))
    wrong = ", ".join(finding.name for finding in findings if not finding.ok)
    terminal.line()
    terminal.line(
        terminal.style(f"Problems found: {wrong}", "red")
        if wrong
        else terminal.style("No problems found.", "green")
    )


# ---- in the child process
def _probe_native() -> dict[str, Any]:
    """Load the native module and the backends."""
    module = native()
    lib, texts = module.lib, {}
    for name, text in (("level", lib.lp_kernels_level()), ("problem", lib.lp_kernels_problem())):
        texts[name] = None if text == module.ffi.NULL else module.ffi.string(text).decode()
    return {"file": module.__file__, "not_loaded": backends_not_loaded(), "kernels": texts}


def _probe_devices() -> dict[str, Any]:
    return {"devices": [asdict(device) for device in lp.devices()]}


def _probe_demo_model() -> dict[str, Any]:
    start = time.perf_counter()
    with lp.Model.demo() as model, lp.Engine(model) as engine:
        loaded = time.perf_counter()
        out = engine.generate("Once upon a time", lp.SamplingParams(max_tokens=8, temperature=0))
        done = time.perf_counter()
        kv = kv_bytes(model, engine.n_cells, "f16", "f16")  # the default cache types
        n_cells, n_seq_max = engine.n_cells, engine.n_seq_max
    return {
        "path": str(lp.demo_model_path()),
        "n_tokens": len(out.token_ids),
        "text": out.text,
        "n_cells": n_cells,
        "n_seq_max": n_seq_max,
        "kv_bytes": kv,
        "load_s": round(loaded - start, 3),
        "generate_s": round(done - loaded, 3),
    }


_PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "native module": _probe_native,
    "devices": _probe_devices,
    "demo model": _probe_demo_model,
}


def run_probes(files: Sequence[str] = ()) -> int:
    """Run the probes in order, in the child process, then look at model files; stop at the first failure.

    Each result is immediately written as a line of JSON, ``{"name": …, …}``, so the parent knows which probe failed.
    """
    probes = _PROBES | {f"model {file}": lambda file=file: look_at(Path(file)) for file in files}
    for name, probe in probes.items():
        print(json.dumps({"name": name, "begin": True}), flush=True)
        try:
            result = {"name": name, "ok": True, **probe()}
        except Exception as error:
            text = str(error) if isinstance(error, LlamapipeError) else f"{type(error).__name__}: {error}"
            result = {"name": name, "ok": False, "error": text}
        print(json.dumps(result), flush=True)
        if not result["ok"]:
            return 1
    return 0
