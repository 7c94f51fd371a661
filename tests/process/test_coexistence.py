"""Another binding of llama.cpp in the same process: each keeps its own libraries, whichever is imported first.

Every case runs in a process of its own, since what is loaded stays loaded.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

import llamapipe

PROMPT = "Once upon a time"
N_TOKENS = 24

_PROGRAM = """
import json, sys, warnings

path, prompt, n_tokens, order = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]


def load_llamapipe():
    import llamapipe as lp

    model = lp.Model(path)
    engine = lp.Engine(model, n_ctx=256, n_seq_max=2)
    closers.extend((engine, model))
    params = lp.SamplingParams(max_tokens=n_tokens, temperature=0)
    return lambda: [out.text for out in engine.generate([prompt, prompt], params)]


def load_llama_cpp():
    warnings.simplefilter("ignore")
    from llama_cpp import Llama

    model = Llama(path, n_ctx=256, verbose=False)
    closers.append(model)
    return lambda: [model.create_completion(prompt, max_tokens=n_tokens, temperature=0)["choices"][0]["text"]]


def load_xllamacpp():
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 256, 1, False
    server = xllamacpp.Server(params)
    body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0}
    return lambda: [json.dumps(server.handle_completions(body)["choices"][0]["text"])]


closers = []
generate = {name: globals()["load_" + name]() for name in order}
# Twice, in turn: what one does must not show in the other.
texts = {name: [call() for _ in range(2)] for name, call in generate.items()}
for name, call in generate.items():
    texts[name].append(call())
for owner in closers:
    owner.close()
try:
    with open("/proc/self/maps") as maps:
        files = sorted({line.split()[-1] for line in maps if ".so" in line})
except FileNotFoundError:
    files = []
print("RESULT" + json.dumps({"texts": texts, "files": files}))
"""


def run(*order: str) -> dict[str, Any]:
    """Load these bindings in this order and let each generate three times; their texts and the libraries mapped."""
    command = [
        sys.executable,
        "-c",
        _PROGRAM,
        str(llamapipe.demo_model_path()),
        PROMPT,
        str(N_TOKENS),
        *order,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return result


@pytest.fixture(scope="module")
def alone() -> list[list[str]]:
    """What llamapipe generates in a process of its own."""
    texts: list[list[str]] = run("llamapipe")["texts"]["llamapipe"]
    assert texts[0][0].strip()
    return texts


@pytest.fixture(params=["llama_cpp", "xllamacpp"])
def peer(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; `nox -s tests` installs it")
    return name


@pytest.mark.parametrize("first", [True, False], ids=["peer first", "llamapipe first"])
def test_two_libraries_generate_as_they_do_alone(peer: str, first: bool, alone: list[list[str]]) -> None:
    both = run(*([peer, "llamapipe"] if first else ["llamapipe", peer]))
    assert both["texts"]["llamapipe"] == alone
    theirs = both["texts"][peer]
    assert theirs[0] == theirs[1] == theirs[2]
    assert theirs[0][0].strip()
    assert theirs == run(peer)["texts"][peer]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_each_has_its_own_libraries() -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp is not installed; `nox -s tests` installs it")
    for order in (("llama_cpp", "llamapipe"), ("llamapipe", "llama_cpp")):
        files = run(*order)["files"]
        for name in ("llama", "ggml-base"):
            assert any(f"/libllamapipe-{name}.so" in file for file in files), files
            assert any(f"/lib{name}.so" in file for file in files), files
