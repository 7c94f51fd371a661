"""Several models in this process: loads, room, and what the calls give."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bert_model import bert_model
from support.control import Worker as Thread
from support.control import all_results, wait_until
from support.gguf_models import tiny_model

import llamapipe as lp
from llamapipe.gguf.check import check_gguf
from llamapipe.model_pool import need_of

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "n_threads": 1, "cache_bytes": 2**22}
SHORT = lp.SamplingParams(max_tokens=4, temperature=0)
PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / f"{name}.gguf") for name in "abc"}


@pytest.fixture(scope="module")
def one_bytes(files: dict[str, Path]) -> int:
    return need_of(check_gguf(files["a"]), False, OPTIONS).n_bytes


@pytest.fixture
def pool(files: dict[str, Path], one_bytes: int) -> Any:
    """With room for two models."""
    with lp.ModelPool(files, int(2.5 * one_bytes), **OPTIONS) as pool:
        yield pool


def loaded(pool: lp.ModelPool) -> str:
    return "".join(one.name for one in pool.status() if one.state == "loaded")


class TestRoom:
    def test_the_least_recently_used_model_goes(self, pool: lp.ModelPool) -> None:
        assert loaded(pool) == ""
        for name, there in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
            assert len(pool.generate(PROMPT, SHORT, model=name).token_ids) == 4
            assert loaded(pool) == there
        assert pool.budget_bytes is not None
        assert sum(one.n_bytes for one in pool.status()) <= pool.budget_bytes

    def test_calls_share_one_load(self, pool: lp.ModelPool) -> None:
        done = all_results([Thread(lambda: pool.generate(PROMPT, SHORT, model="a")) for _ in range(6)])
        assert len({tuple(one.token_ids) for one in done}) == 1
        with pool.engine("a") as engine:
            assert engine.stats().n_requests == 6

    def test_a_model_in_use_stays(self, pool: lp.ModelPool) -> None:
        with ThreadPoolExecutor() as threads:
            with pool.engine("a") as engine:
                with pool.engine("b"):
                    waiting = threads.submit(pool.generate, PROMPT, SHORT, model="c")
                    wait_until(
                        lambda: [one.state for one in pool.status()] == ["loaded", "loaded", "loading"]
                    )
                assert len(waiting.result(60).token_ids) == 4
                assert loaded(pool) == "ac"
                assert not engine.closed
            pool.unload("a")
            assert engine.closed

    def test_a_model_that_is_never_idle_makes_room(self, files: dict[str, Path], one_bytes: int) -> None:
        ended = threading.Event()

        def always() -> int:
            n = 0
            while not ended.is_set():
                n += len(small.generate(PROMPT, lp.SamplingParams(max_tokens=50), model="a").token_ids) > 0
            return n

        with lp.ModelPool(files, int(1.5 * one_bytes), **OPTIONS) as small, ThreadPoolExecutor(4) as threads:
            others = [threads.submit(always) for _ in range(4)]
            wait_until(lambda: loaded(small) == "a")
            try:
                assert len(small.generate(PROMPT, SHORT, model="b").token_ids) == 4
            finally:
                ended.set()
            assert all(one.result(60) for one in others)

    def test_pinned_models_stay(self, files: dict[str, Path], one_bytes: int) -> None:
        with lp.ModelPool(files, int(2.5 * one_bytes), keep=["a"], **OPTIONS) as pinned:
            for name in "abc":
                pinned.load(name)
            assert loaded(pinned) == "ac"

    def test_a_model_larger_than_the_budget(self, files: dict[str, Path]) -> None:
        with (
            lp.ModelPool(files, 2**20, **OPTIONS) as small,
            pytest.raises(lp.errors.BackendError, match="budget_bytes"),
        ):
            small.load("a")

    def test_a_conversation_survives_its_model(self, pool: lp.ModelPool) -> None:
        before = pool.generate(PROMPT, SHORT, model="a")
        pool.unload("a")
        assert loaded(pool) == ""
        again = pool.generate(PROMPT + before.token_ids, SHORT, model="a")
        assert again.n_cached_tokens >= 103


class TestCalls:
    def test_they_are_those_of_the_engine(self, pool: lp.ModelPool, files: dict[str, Path]) -> None:
        with lp.Engine(files["a"], **OPTIONS) as engine:
            expected = engine.generate(PROMPT, SHORT)
        assert pool.generate([PROMPT, PROMPT], SHORT, model="a")[1].token_ids == expected.token_ids
        assert "".join(delta.text for delta in pool.stream(PROMPT, SHORT, model="a")) == expected.text

        async def main() -> None:
            done = await asyncio.gather(*(pool.agenerate(PROMPT, SHORT, model=name) for name in "aba"))
            assert {tuple(one.token_ids) for one in done} == {tuple(expected.token_ids)}
            texts = [delta.text async for delta in pool.astream(PROMPT, SHORT, model="a")]
            assert "".join(texts) == expected.text

        asyncio.run(main())

    def test_chats(self) -> None:
        params = lp.SamplingParams(max_tokens=5, temperature=0)
        with lp.ModelPool({"demo": lp.demo_model_path()}, n_ctx=256) as demos:
            answer = demos.chat("Hello", params, model="demo")
            text = "".join(delta.content for delta in demos.stream_chat("Hello", params, model="demo"))

            async def main() -> tuple[str, str]:
                whole = await demos.achat("Hello", params, model="demo")
                parts = [delta.content async for delta in demos.astream_chat("Hello", params, model="demo")]
                return whole.content, "".join(parts)

            assert (answer.content, answer.content) == asyncio.run(main())
            assert text == answer.content

    def test_embeddings(self, tmp_path: Path, files: dict[str, Path]) -> None:
        bert_model(tmp_path / "bert.gguf")
        models: dict[str, Any] = {
            "bert": tmp_path / "bert.gguf",
            "a": files["a"],
            "as vectors": {"file": files["a"], "embeddings": True},
        }
        with lp.ModelPool(models, n_ctx=256, n_threads=1) as mixed:
            vectors = mixed.embed(["hello", "world"], model="bert")
            assert vectors.shape[0] == 2
            assert np.array_equal(asyncio.run(mixed.aembed(["hello", "world"], model="bert")), vectors)
            assert mixed.embed("x", model="as vectors").ndim == 1
            with mixed.embedder("bert") as embedder:
                assert embedder.pooling == "mean"
            before = [one.state for one in mixed.status()]
            with pytest.raises(ValueError, match="it does not generate"):
                mixed.generate("x", model="bert")
            with pytest.raises(ValueError, match="generates texts"):
                mixed.embed("x", model="a")
            assert [one.state for one in mixed.status()] == before

    def test_a_task_that_is_cancelled_leaves_nothing(self, pool: lp.ModelPool) -> None:
        async def main() -> None:
            async with pool.aengine("a"), pool.aengine("b"):
                task = asyncio.ensure_future(pool.agenerate(PROMPT, SHORT, model="c"))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await pool.agenerate(PROMPT, SHORT, model="c")

        asyncio.run(main())
        wait_until(lambda: all(one.n_calls == 0 for one in pool.status()))

    def test_mistakes(self, pool: lp.ModelPool, files: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is no model 'd'"):
            pool.generate("x", model="d")
        for models, error, text in (
            ({}, ValueError, "empty"),
            ([], TypeError, "mapping"),
            ({"a": 5}, TypeError, "path"),
            ({"a": {}}, TypeError, "path"),
            ({"a": {"file": "x", "n_ctxx": 1}}, TypeError, "n_ctxx"),
            ({"a": {"file": "x", "embeddings": 1}}, TypeError, "embeddings"),
            ({5: "x"}, TypeError, "name"),
        ):
            with pytest.raises(error, match=text):
                lp.ModelPool(models)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'d'"):
            lp.ModelPool(files, keep=["d"])
        with lp.ModelPool({"a": tmp_path / "missing.gguf"}) as broken:
            for _ in range(2):
                with pytest.raises(lp.errors.ModelLoadError):
                    broken.load("a")
            assert broken.status() == [lp.ModelStatus("a", "unloaded", 0, 0, False)]
        with pytest.raises(lp.errors.EngineClosedError):
            broken.load("a")
