"""The Python blocks of llama-cpp-python's README run with one changed import."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
from support.run_script import run_script
from support.small_hub import small_hub

import llamapipe as lp

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; `nox -s tests` builds it")
BLOCKS = re.findall(r"```python\n(.*?)```", str(metadata("llama-cpp-python").json["description"]), re.DOTALL)
# A first line of each block that runs without a network, and blocks that need what llamapipe does not have.
RUN = [
    block
    for block in BLOCKS
    if ("Llama(" in block or '"id"' in block)
    and not re.search(r"from_pretrained|chat_handler|draft_model|llama_backend_init", block)
]
REFUSED = [block for block in BLOCKS if re.search(r"draft_model|Llava15ChatHandler", block)]
HUB = [
    block
    for block in BLOCKS
    if block.startswith("llm = Llama.from_pretrained(") and "functionary" not in block
]


def changed(block: str) -> str:
    """The block after its import was changed, and the paths that it names."""
    code = block.replace("from llama_cpp import Llama", "from llamapipe.compat import Llama")
    code = code.replace("import llama_cpp\n", "import llamapipe.compat as llama_cpp\n")
    return code if "import" in code else f"from llamapipe.compat import Llama\n{code}"


def test_most_blocks_run() -> None:
    assert (len(RUN), len(REFUSED), len(HUB)) == (8, 2, 1)


@pytest.mark.parametrize("block", RUN, ids=range(len(RUN)))
def test_blocks(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in re.findall(r'model_path="([^"]+)"', block):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).symlink_to(lp.demo_model_path())
    monkeypatch.chdir(tmp_path)
    run_script(changed(block))


def test_the_block_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = HUB
    repo = re.search(r'repo_id="([^"]+)"', block)
    assert repo is not None
    with small_hub({repo[1]: {"model-Q8_0.gguf": lp.demo_model_path().read_bytes()}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        said = run_script(changed(block) + '\nprint(llm("a", max_tokens=2)["usage"]["completion_tokens"])')
    assert said == "2\n"


@pytest.mark.parametrize("block", REFUSED, ids=range(len(REFUSED)))
def test_blocks_that_need_more(block: str) -> None:
    """Their options are refused with a reason."""
    option = "draft_model" if "draft_model" in block else "chat_handler"
    said = run_script(
        "from llamapipe.compat import Llama\n"
        f"try:\n    Llama('m.gguf', {option}=object())\nexcept ValueError as error:\n    print(error)"
    )
    assert f"{option}=" in said
    assert "is not supported" in said
