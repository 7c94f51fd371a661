"""Embeddings against numpy's own forward pass, batches against single texts, callers together, bad input."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import gguf
import numpy as np
import pytest
from support.bert_model import WORDS, Bert, bert_model
from support.control import PATIENCE_S
from support.gguf_models import BROKEN, damaged_model

import llamapipe as lp
from llamapipe.embedding import EmbedCall, Worker
from llamapipe.errors import DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.llama.embedding_context import EmbeddingContext
from llamapipe.llama.vocab import Vocab

CLOSE = 5e-3  # ggml looks GELU up in a table of 16 bits
TEXTS = [" ".join(WORDS[i % 10 :][: 1 + i % 9]) for i in range(60)]


@pytest.fixture(scope="module")
def file_and_bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bert]:
    return bert_model(tmp_path_factory.mktemp("models") / "bert.gguf")


@pytest.fixture(scope="module")
def encoder(file_and_bert: tuple[Path, Bert]) -> Iterator[lp.Embedder]:
    with lp.Embedder(file_and_bert[0], n_seq_max=4) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[lp.Embedder, Bert]]:
    path, bert = bert_model(tmp_path_factory.mktemp("models") / "rank.gguf", "rank", rank_head=True)
    with lp.Embedder(path) as embedder:
        yield embedder, bert


class TestValues:
    @pytest.mark.parametrize("pooling", ["mean", "cls", "last", "none"])
    def test_an_encoder_is_numpys(self, file_and_bert: tuple[Path, Bert], pooling: str) -> None:
        path, bert = file_and_bert
        with lp.Embedder(path, pooling=pooling) as embedder:
            for text in TEXTS[:12]:
                hidden = bert.hidden(embedder.tokenize(text))
                expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1], "none": hidden}[
                    pooling
                ]
                np.testing.assert_allclose(embedder.embed(text, normalize=False), expected, atol=CLOSE)

    def test_vectors_have_length_one(self, encoder: lp.Embedder) -> None:
        np.testing.assert_allclose(np.linalg.norm(encoder.embed(TEXTS), axis=1), 1, atol=1e-5)

    @pytest.mark.parametrize("pooling", ["mean", "last", "cls", None])
    def test_batched_equals_single(
        self, file_and_bert: tuple[Path, Bert], tiny: lp.Model, pooling: str | None
    ) -> None:
        for model in (file_and_bert[0], tiny):
            with lp.Embedder(model, pooling=pooling, n_seq_max=7) as embedder:
                texts = [*TEXTS, "z" * 40]
                together = embedder.embed(texts)
                alone = np.stack([embedder.embed(text) for text in texts])
                # ggml's products of F16 weights round by batch on ARM.
                np.testing.assert_allclose(together, alone, atol=1e-4 if embedder.model.attends else 2e-4)

    @pytest.mark.parametrize("kernels", ["auto", "ggml"])
    def test_what_is_beside_a_text_does_not_show(
        self, file_and_bert: tuple[Path, Bert], kernels: Any
    ) -> None:
        """With ggml's flash attention vectors would differ by 2e-4."""
        rng = random.Random(0)
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(40)]
        with (
            lp.Model(file_and_bert[0], kernels=kernels) as model,
            lp.Embedder(model, n_seq_max=8) as embedder,
        ):
            alone = np.stack([embedder.embed(text) for text in texts])
            np.testing.assert_allclose(embedder.embed(texts), alone, atol=5e-5)

    def test_any_number_of_texts(self, encoder: lp.Embedder) -> None:
        vectors = encoder.embed(TEXTS * 9)
        assert vectors.shape == (540, 64)
        np.testing.assert_allclose(vectors.reshape(9, 60, 64)[4], vectors[:60], atol=1e-4)

    def test_each_token_has_a_vector_unpooled(self, file_and_bert: tuple[Path, Bert]) -> None:
        with lp.Embedder(file_and_bert[0], pooling="none") as embedder:
            rows = embedder.embed(TEXTS[:9])
            assert isinstance(rows, list)
            assert [row.shape for row in rows] == [(len(embedder.tokenize(text)), 64) for text in TEXTS[:9]]

    def test_tokens_are_texts(self, encoder: lp.Embedder) -> None:
        tokens = encoder.tokenize("the fox")
        np.testing.assert_array_equal(encoder.embed(tokens), encoder.embed("the fox"))
        mixed: list[Any] = [tokens, "the owl"]
        assert encoder.embed(mixed).shape == (2, 64)
        assert encoder.embed([]).shape == (0, 64)

    def test_a_decoder_gives_the_last_state(self, demo: lp.Model) -> None:
        with lp.Embedder(demo) as embedder:
            assert embedder.pooling == "last"
            fox, owl, sum_ = embedder.embed(["The fox ran.", "The owl ran.", "1, 2, 3, 4,"])
            assert fox @ owl > fox @ sum_

    def test_a_recurrent_model_works(self, recurrent: lp.Model) -> None:
        with lp.Embedder(recurrent, n_seq_max=4) as embedder:
            texts = [[5, 6, 7], [8, 9], [10] * 20, [5, 6, 7]]
            vectors = embedder.embed(texts)
            np.testing.assert_allclose(vectors[0], vectors[3], atol=1e-4)
            np.testing.assert_allclose(vectors, np.stack([embedder.embed(text) for text in texts]), atol=1e-4)


class TestReranking:
    def test_scores_are_numpys_and_the_best_comes_first(self, reranker: tuple[lp.Embedder, Bert]) -> None:
        embedder, bert = reranker
        documents = TEXTS[:20]
        ranked = embedder.rerank("the fox", documents)
        assert [entry.score for entry in ranked] == sorted((entry.score for entry in ranked), reverse=True)
        assert sorted(entry.index for entry in ranked) == list(range(20))
        for entry in ranked:
            query = embedder.model.tokenize("the fox", add_special=False)
            document = embedder.model.tokenize(documents[entry.index], add_special=False)
            assert entry.score == pytest.approx(bert.score([2, *query, 3, *document]), abs=0.02)

    def test_the_query_is_tokenized_once(
        self, reranker: tuple[lp.Embedder, Bert], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts: list[str] = []
        tokenize = Vocab.tokenize

        def noted(vocab: Vocab, text: str, **options: Any) -> list[int]:
            texts.append(text)
            return tokenize(vocab, text, **options)

        monkeypatch.setattr(Vocab, "tokenize", noted)
        reranker[0].rerank("the fox", TEXTS[:5])
        assert texts == ["the fox", *TEXTS[:5]]

    def test_no_documents_have_no_ranks(self, reranker: tuple[lp.Embedder, Bert]) -> None:
        assert reranker[0].rerank("the fox", []) == []

    def test_a_model_without_a_head_is_refused(
        self, encoder: lp.Embedder, file_and_bert: tuple[Path, Bert]
    ) -> None:
        with pytest.raises(InvalidRequestError, match="needs a model with a rank head"):
            encoder.rerank("the fox", ["the owl"])
        with pytest.raises(InvalidRequestError, match="has no rank head"):
            lp.Embedder(file_and_bert[0], pooling="rank")

    def test_a_reranker_embeds_nothing(self, reranker: tuple[lp.Embedder, Bert]) -> None:
        with pytest.raises(InvalidRequestError, match=r"rerank\(\)"):
            reranker[0].embed("the fox")

    def test_long_documents_are_refused_or_cut(self, reranker: tuple[lp.Embedder, Bert]) -> None:
        embedder, _ = reranker
        with pytest.raises(
            InvalidRequestError, match=r"document 1 has \d+ tokens with the query; n_ctx is 64"
        ):
            embedder.rerank("the fox", ["the owl", "the owl " * 40])
        assert len(embedder.rerank("the fox", ["the owl", "the owl " * 40], truncate=True)) == 2
        with pytest.raises(InvalidRequestError, match=r"n_ctx is 64: shorten the query$"):
            embedder.rerank("the fox " * 40, ["the owl"], truncate=True)


class TestCallers:
    def test_threads_get_the_vectors_of_their_texts(self, encoder: lp.Embedder) -> None:
        expected = encoder.embed(TEXTS)
        with ThreadPoolExecutor(12) as pool:
            rows = list(pool.map(encoder.embed, TEXTS * 3))
        np.testing.assert_allclose(np.stack(rows[60:120]), expected, atol=1e-4)

    def test_a_long_list_does_not_keep_a_text_waiting(self, file_and_bert: tuple[Path, Bert]) -> None:
        begun, answers, others = threading.Event(), SimpleQueue[Any](), SimpleQueue[Any]()
        long = EmbedCall([[2, 5, 6, 3]] * 5000, others.put, lambda _: begun.set())
        with lp.Model(file_and_bert[0]) as model:
            worker = Worker(EmbeddingContext(model))
            worker.start()
            worker.submit(long)
            begun.wait()
            worker.submit(EmbedCall([[2, 5, 3]], answers.put))
            assert len(answers.get()) == 1
            assert others.empty()
            worker.close(drain=False)

    def test_tasks_get_the_same_results(
        self, encoder: lp.Embedder, reranker: tuple[lp.Embedder, Bert]
    ) -> None:
        async def run() -> None:
            rows = await asyncio.gather(*(encoder.aembed(text) for text in TEXTS))
            np.testing.assert_allclose(np.stack(rows), encoder.embed(TEXTS), atol=1e-4)
            ranked = await reranker[0].arerank("the fox", TEXTS[:5])
            assert ranked == reranker[0].rerank("the fox", TEXTS[:5])

        asyncio.run(run())

    def test_asyncio_needs_no_thread_of_the_default_executor(
        self, encoder: lp.Embedder, reranker: tuple[lp.Embedder, Bert]
    ) -> None:
        async def run() -> None:
            loop, opened = asyncio.get_running_loop(), threading.Event()
            loop.set_default_executor(ThreadPoolExecutor(1))
            held = loop.run_in_executor(None, opened.wait)
            answers = asyncio.gather(encoder.aembed(TEXTS[:2]), reranker[0].arerank("the fox", TEXTS[:2]))
            try:
                assert list(map(len, await asyncio.wait_for(answers, PATIENCE_S))) == [2, 2]
            finally:
                opened.set()
            await held

        asyncio.run(run())

    def test_a_cancelled_task_drops_its_texts(self, encoder: lp.Embedder) -> None:
        async def run() -> None:
            task = asyncio.ensure_future(encoder.aembed(TEXTS * 500))
            await encoder.aembed("the fox")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert np.asarray(await encoder.aembed("the fox")).shape == (64,)

        asyncio.run(run())


def _put(answers: SimpleQueue[tuple[str, Any]], name: str, answer: Any) -> None:
    answers.put((name, answer))


class TestDamage:
    @pytest.mark.parametrize("is_ours", [True, False])
    def test_numbers_that_are_not_finite_fail_only_their_text(self, tmp_path: Path, is_ours: bool) -> None:
        path = damaged_model(tmp_path / "damaged.gguf")
        good, broken = [5, 6, 7], [5, BROKEN]
        with (
            lp.Model(path, kernels="auto" if is_ours else "ggml") as model,
            lp.Embedder(model, pooling="mean") as embedder,
        ):
            expected = embedder.embed([good], normalize=False)[0]
            assert np.isfinite(expected).all()
            worker = Worker(EmbeddingContext(model, pooling="mean"))
            try:
                answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
                calls = (("two", [broken, good, broken]), ("good", [good]))  # in one batch
                for name, texts in calls:
                    worker.submit(EmbedCall(texts, partial(_put, answers, name)))
                worker.start()
                by_name = dict(answers.get(timeout=PATIENCE_S) for _ in calls)
            finally:
                worker.close(drain=True)
            assert answers.empty()
            assert "not finite" in str(by_name["two"]) and isinstance(by_name["two"], DecodeError)
            np.testing.assert_allclose(by_name["good"][0], expected, rtol=1e-3, atol=1e-5)
            # Nor do they reach later texts through the cells.
            with pytest.raises(DecodeError, match="not finite"):
                embedder.embed([[5, 6, 7, 8, BROKEN], good])
            np.testing.assert_allclose(embedder.embed(good, normalize=False), expected, rtol=1e-3, atol=1e-5)

    def test_an_encoder_does_not_return_zeros_for_them(self, file_and_bert: tuple[Path, Bert]) -> None:
        path = shutil.copy(file_and_bert[0], file_and_bert[0].with_name("damaged.gguf"))
        tensors = gguf.GGUFReader(path, "r+").tensors
        next(tensor for tensor in tensors if tensor.name == "token_embd.weight").data[10] = np.inf
        with lp.Embedder(path) as embedder:
            with pytest.raises(DecodeError, match="not finite"):
                embedder.embed([[10], [11]])
            assert np.linalg.norm(embedder.embed([11])) == pytest.approx(1)


class TestEnds:
    @pytest.mark.parametrize("drain", [True, False])
    def test_closing_finishes_calls_or_refuses_them(
        self, file_and_bert: tuple[Path, Bert], drain: bool
    ) -> None:
        begun, answers = threading.Event(), SimpleQueue[Any]()
        call = EmbedCall([[2, 5, 6, 3]] * 3000, answers.put, lambda _: begun.set())
        with lp.Model(file_and_bert[0]) as model:
            worker = Worker(EmbeddingContext(model, n_threads=1))
            worker.start()
            worker.submit(call)
            begun.wait()
            worker.close(drain)
            answer = answers.get()
            if drain:
                assert len(answer) == 3000
            else:
                assert isinstance(answer, EngineClosedError)
                assert "before these texts were computed" in str(answer)
            with pytest.raises(EngineClosedError, match="is closed"):
                worker.submit(call)

    def test_a_dropped_embedder_ends_its_thread(self, file_and_bert: tuple[Path, Bert]) -> None:
        with lp.Model(file_and_bert[0]) as model:
            before = set(threading.enumerate())
            with pytest.warns(ResourceWarning, match="was never closed"):
                lp.Embedder(model).embed("the fox")
            for thread in set(threading.enumerate()) - before:
                thread.join(60)
                assert not thread.is_alive()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_child_process_is_refused(self, encoder: lp.Embedder) -> None:
        encoder.embed("the fox")
        pid = os.fork()
        if pid == 0:
            try:
                encoder.embed("the fox")
            except EngineClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    def test_the_model_is_kept_while_it_is_used(self, file_and_bert: tuple[Path, Bert]) -> None:
        with (
            lp.Model(file_and_bert[0]) as model,
            lp.Embedder(model),
            pytest.raises(EngineClosedError, match="an Embedder"),
        ):
            model.close()


class TestBadInput:
    @pytest.mark.parametrize(
        ("texts", "error", "message"),
        [
            (["the fox", []], InvalidRequestError, "text 1 is empty"),
            ([[]], InvalidRequestError, "text 0 is empty"),
            (["the " * 70], InvalidRequestError, r"text 0 has 72 tokens; n_ctx is 64"),
            ([[10**6]], ValueError, "text 0"),
            ([[-1]], ValueError, "text 0"),
            (3, TypeError, "texts must be"),
            (None, TypeError, "texts must be"),
            (b"fox", TypeError, "texts must be"),
            (["fox", 3], TypeError, "text 1"),
            ({"a": 1}, TypeError, "texts must be"),
        ],
    )
    def test_it_is_named(
        self, encoder: lp.Embedder, texts: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            encoder.embed(texts)

    def test_no_text_is_as_spaces(self, encoder: lp.Embedder) -> None:
        """Both are the special tokens only; a list with such a text is computed like any other."""
        np.testing.assert_array_equal(encoder.embed(""), encoder.embed("  "))
        np.testing.assert_allclose(encoder.embed(["the fox", ""])[1], encoder.embed(""), atol=1e-5)

    def test_long_texts_are_cut_on_demand(self, encoder: lp.Embedder) -> None:
        cut = encoder.embed("the " * 70, truncate=True)
        tokens = encoder.tokenize("the " * 70)
        np.testing.assert_allclose(cut, encoder.embed([*tokens[:63], tokens[-1]]), atol=1e-5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"pooling": "max"}, "pooling is 'max'"),
            ({"n_ctx": 0}, "n_ctx"),
            ({"n_ctx": 65}, "positions for 64 tokens"),
            ({"n_seq_max": 0}, "n_seq_max"),
            ({"n_seq_max": 10**6}, "n_seq_max"),
            ({"n_threads": 0}, "n_threads"),
        ],
    )
    def test_options_are_checked(
        self, file_and_bert: tuple[Path, Bert], options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            lp.Embedder(file_and_bert[0], **options)

    def test_options_of_other_libraries(self, file_and_bert: tuple[Path, Bert]) -> None:
        with lp.Embedder(file_and_bert[0], n_seq_max=1) as embedder:
            calls: Any = embedder
            for call, name, hint in (
                (calls.embed, "use_tqdm", "use progress"),
                (calls.embed, "pooling_params", r"Embedder\(model, pooling=…\)"),
                (calls.rerank, "truncate_prompt_tokens", "use truncate"),
                (
                    lambda *texts, **options: asyncio.run(calls.aembed(*texts, **options)),
                    "normalise",
                    "normalize",
                ),
            ):
                with pytest.raises(TypeError, match=rf"has no option '{name}'; .*{hint}"):
                    call("a", ["b"], **{name: 1})

    def test_an_engine_names_the_embedder(self, file_and_bert: tuple[Path, Bert]) -> None:
        with pytest.raises(ValueError, match=r"lp\.Embedder"):
            lp.Engine(file_and_bert[0])

    def test_what_is_no_model_is_refused(self) -> None:
        with pytest.raises(TypeError, match="model must be"):
            lp.Embedder(3)  # type: ignore[arg-type]
