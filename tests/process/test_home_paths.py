"""``~`` in a path is the home folder wherever a path is taken, as in a shell; a file of that name stays itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import llamapipe as lp
from llamapipe.arguments import path_of
from llamapipe.cli import main
from llamapipe.cli.chat import line_history

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the home folder is $HOME")


@pytest.fixture
def home(tmp_path: Path, tiny: lp.Model, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a model, which is not the working folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(tiny.path, folder / "m.gguf")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("path", ["~/m.gguf", Path("~/m.gguf"), b"~/m.gguf"])
def test_models(home: Path, path: str) -> None:
    with lp.Model(path) as model:
        assert model.path == home / "m.gguf"
    with lp.Engine("~/m.gguf", n_ctx=64) as engine:
        assert engine.model.path == home / "m.gguf"


def test_jobs_traces_templates_and_tokenizers(home: Path) -> None:
    (home / "t.jinja").write_text("{{ messages[0].content }}")
    (home / "in.jsonl").write_text('{"prompt": "a"}\n')
    with lp.Model("~/m.gguf", chat_template="~/t.jinja") as model:
        assert model.render_chat([{"role": "user", "content": "x"}]) == "x"
        with lp.Engine(model, n_ctx=64, tuning=lp.EngineTuning(trace="~/t.json")) as engine:
            done = lp.run_batch(
                Path("~/in.jsonl"), engine, lp.SamplingParams(max_tokens=2), output="~/out.jsonl"
            )
    assert done.n_done == 1
    assert (home / "out.jsonl").exists()
    assert (home / "t.json").exists()


def test_the_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "in.jsonl").write_text('{"prompt": "a"}\n')
    words = ["batch", "-m=~/m.gguf", "~/in.jsonl", "--output=~/out.jsonl", "--max-tokens=2", "--n-ctx=64"]
    assert main(words) == 0, capsys.readouterr().err
    assert (home / "out.jsonl").exists()


def test_a_file_of_that_name_and_a_home_that_is_unknown(home: Path, tmp_path: Path) -> None:
    (tmp_path / "~backup").write_text("x")
    assert path_of("~backup") == Path("~backup")
    with pytest.raises(ValueError, match="write the whole path"):
        path_of("~nobody-has-this-name/m.gguf")


def test_without_a_home_weights_are_packed_in_memory(
    tiny: lp.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with ``env -i`` under a user id that has no name, which containers have."""

    def no_name(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "LLAMAPIPE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_name)
    for packed_cache in ("auto", True):
        with lp.Model(tiny.path, packed_cache=packed_cache) as model:
            assert model.packed_folder is None
        assert "packed weights stay in memory: give a folder" in caplog.text
    with line_history():
        pass
