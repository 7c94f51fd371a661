"""Several models in this process: loads, room, and what the calls give."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bert_model import bert_model
from support.control import Worker as Thread
from support.control import all_results, wait_until
from support.gguf_models import tiny_model

import llamapipe as lp
from llamapipe.gguf.check import check_gguf, tensor_bytes
from llamapipe.llama.kv_memory import kv_bytes
from llamapipe.model_pool import Need, need_of

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


class TestNeed:
    def test_layers_move_from_the_system_to_gpus(self, files: dict[str, Path]) -> None:
        """The output first, then the last layers with their cells; the input stays."""
        info = check_gguf(files["a"])

        def need(**more: Any) -> Need:
            return need_of(info, False, {**OPTIONS, **more}, has_gpus=True)

        n_layer, bytes_of = info.n_layer, {t.name: tensor_bytes(t) for t in info.tensors}
        needs = [need(n_gpu_layers=n) for n in range(n_layer + 2)]
        without = need_of(info, False, OPTIONS)
        assert needs[0] == without and without.gpu_bytes == 0
        steps = 4 * info.n_vocab * 256
        output = bytes_of["output_norm.weight"] + bytes_of.get("output.weight", bytes_of["token_embd.weight"])
        assert needs[1].gpu_bytes == output + steps
        cell = n_layer * (needs[2].gpu_bytes - needs[1].gpu_bytes - _of_layer(bytes_of, n_layer - 1))
        with lp.Model(files["a"]) as model:
            assert cell == kv_bytes(model, OPTIONS["n_ctx"] * OPTIONS["n_seq_max"], "f16", "f16")
        for n, (before, after) in enumerate(pairwise(needs[1:])):
            moved = _of_layer(bytes_of, n_layer - 1 - n) + cell // n_layer
            assert after.gpu_bytes - before.gpu_bytes == before.n_bytes - after.n_bytes == moved
        assert (
            need()
            == need(n_gpu_layers=-1)
            == need(n_gpu_layers=10**6)
            == need(devices=["CUDA0"])
            == needs[-1]
        )
        assert need(rpc=("host:1",)) == need(devices=["CPU"]) == without

    def test_a_draft_model_is_where_the_model_is(self, files: dict[str, Path]) -> None:
        info = check_gguf(files["a"])
        for n, share in ((-1, 1), (0, 0)):
            alone, both = (
                need_of(info, False, {**OPTIONS, "n_gpu_layers": n, **more}, True)
                for more in ({}, {"draft": str(files["b"])})
            )
            assert both.n_bytes > alone.n_bytes
            assert both.gpu_bytes == (1 + share) * alone.gpu_bytes


def _of_layer(bytes_of: dict[str, int], i: int) -> int:
    return sum(n for name, n in bytes_of.items() if name.startswith(f"blk.{i}."))


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

    def test_gpus_have_a_budget_besides(self, files: dict[str, Path]) -> None:
        """As if there were a GPU: each model's two layers and output are on it."""
        models = {
            name: {"file": files[name], "n_gpu_layers": n} for name, n in (("a", -1), ("b", 99), ("c", 0))
        }
        one = need_of(check_gguf(files["a"]), False, OPTIONS, has_gpus=True)
        with lp.ModelPool({**models, "d": files["a"]}, 2**31, **OPTIONS) as pool:
            pool._gpu_bytes = int(1.5 * one.gpu_bytes)
            for name, there in (("a", "a"), ("c", "ac"), ("b", "bc"), ("c", "bc"), ("d", "cd")):
                pool.load(name)
                assert loaded(pool) == there
            held = {one.name: one.gpu_bytes for one in pool.status()}
            assert held == {"a": 0, "b": 0, "c": 0, "d": one.gpu_bytes}
            pool.unload("d")
            pool._gpu_bytes = one.gpu_bytes - 1
            with pytest.raises(
                lp.errors.BackendError, match=r"layers on GPUs need .* a smaller n_gpu_layers"
            ):
                pool.load("a")
            pool.load("c")

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
