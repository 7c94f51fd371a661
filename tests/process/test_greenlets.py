"""Programs whose threads gevent or eventlet has replaced: an engine refuses at once, where it would wait for ever."""

from __future__ import annotations

import importlib.util

import pytest
from support.run_script import run_script

ENGINE = """
import llamapipe as lp
with lp.Model.demo() as model:
    for make in (lp.Engine, lp.Embedder):
        try:
            made = make(model, n_ctx=64)
        except RuntimeError as error:
            say(error)
        else:
            with made:
                say(make.__name__)
"""
# A replaced function as these libraries have them: what tells them is its module.
STAND_IN = """
import _thread
def start_new_thread(*arguments):
    raise AssertionError("no thread of ours is started")
start_new_thread.__module__ = "gevent.thread"
_thread.start_new_thread = start_new_thread
"""
GEVENT = "from gevent import monkey; monkey.patch_all({})"
REMEDY = "gevent.monkey.patch_all(thread=False, queue=False)"


def test_replaced_threads_are_refused() -> None:
    said = run_script(STAND_IN + ENGINE).splitlines()
    assert len(said) == 2 and all(REMEDY in line for line in said)


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="needs gevent")
class TestGevent:
    @pytest.mark.parametrize("options", ["", "thread=False", "queue=False"])
    def test_is_refused(self, options: str) -> None:
        said = run_script(GEVENT.format(options) + ENGINE).splitlines()
        assert len(said) == 2 and all(REMEDY in line for line in said)

    def test_works_with_real_threads(self) -> None:
        program = GEVENT.format("thread=False, queue=False") + ENGINE
        assert run_script(program) == "Engine\nEmbedder\n"
