"""``/v1/embeddings`` and ``/v1/rerank``, through OpenAI's client and by hand."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.bert_model import WORDS, bert_model
from support.served import http_client

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

TEXTS = [" ".join(WORDS[i:][:4]) for i in range(10)]


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Embedder]:
    with lp.Embedder(bert_model(tmp_path_factory.mktemp("models") / "bert.gguf")[0]) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def url(engine: lp.Engine, embedder: lp.Embedder) -> Iterator[str]:
    with serve(engine, embedder=embedder) as server:
        yield server.url


def test_llama_servers_routes(url: str, embedder: lp.Embedder) -> None:
    expected = embedder.embed(TEXTS[:2])
    for path in ("/embedding", "/embeddings"):
        entries = httpx.post(url + path, json={"content": TEXTS[:2], "model": "bert"}).json()
        assert [entry["index"] for entry in entries] == [0, 1]
        assert np.allclose([entry["embedding"][0] for entry in entries], expected, atol=1e-6)
        (alone,) = httpx.post(url + path, json={"input": TEXTS[0], "embd_normalize": -1}).json()
        plain = embedder.embed(TEXTS[0], normalize=False)
        assert np.allclose(alone["embedding"][0], plain, atol=1e-5)
    bodies: tuple[dict[str, Any], ...] = (
        {},
        {"content": []},
        {"content": "a", "input": "b"},
        {"content": "a", "embd_normalize": -2},
        {"content": "a", "embd_normalize": 1025},
    )
    for body in bodies:
        assert httpx.post(f"{url}/embedding", json=body).status_code == 400


def test_llama_servers_norms(url: str, embedder: lp.Embedder) -> None:
    plain = embedder.embed(TEXTS[0], normalize=False)
    norms = {0: np.abs(plain).max() / 32760, 1: np.abs(plain).sum(), 3: (np.abs(plain) ** 3).sum() ** (1 / 3)}
    for p, norm in norms.items():
        (entry,) = httpx.post(f"{url}/embedding", json={"content": TEXTS[0], "embd_normalize": p}).json()
        assert np.allclose(entry["embedding"][0], plain / norm, rtol=1e-4), p
        openais = httpx.post(f"{url}/v1/embeddings", json={"input": TEXTS[0], "embd_normalize": p}).json()
        assert openais["data"][0]["embedding"] == entry["embedding"][0]


def test_vllms_fields_with_the_only_values_that_hold_here(url: str) -> None:
    body: dict[str, Any] = {
        "input": "the fox " * 1000,
        "truncate_prompt_tokens": -1,
        "truncation_side": "right",
    }
    body |= {
        "add_special_tokens": True,
        "use_activation": True,
        "embed_dtype": "float32",
        "padding": "do_not_pad",
    }
    answer = httpx.post(f"{url}/v1/embeddings", json=body)
    assert answer.status_code == 200 and "x-llamapipe-unused" not in answer.headers
    changes = {
        "truncate_prompt_tokens": 5,
        "truncation_side": "left",
        "use_activation": False,
        "endianness": "big",
    }
    for name, value in changes.items():
        error = httpx.post(f"{url}/v1/embeddings", json={**body, name: value}).json()["error"]
        assert error["param"] == name


def test_texts_with_token_ids(url: str, embedder: lp.Embedder) -> None:
    """As in llama-server, a list with an id is one text; others are several texts."""
    ids = embedder.tokenize("the fox")
    fox = embedder.model.vocab.tokenize("fox", add_special=False)
    texts: list[Any] = [TEXTS[0], ids, [ids[0], "fox", *ids[2:]]]
    same: list[Any] = [TEXTS[0], ids, [ids[0], *fox, *ids[2:]]]
    expected = embedder.embed(same)
    entries = httpx.post(f"{url}/embedding", json={"content": texts}).json()
    assert np.allclose([entry["embedding"][0] for entry in entries], expected, atol=1e-6)
    answer = httpx.post(f"{url}/v1/embeddings", json={"input": texts[2]}).json()
    assert np.allclose([entry["embedding"] for entry in answer["data"]], expected[2:], atol=1e-6)
    objects = [{"prompt_string": TEXTS[0]}, ids]
    entries = httpx.post(f"{url}/embedding", json={"content": objects}).json()
    assert np.allclose([entry["embedding"][0] for entry in entries], expected[:2], atol=1e-6)
    for text in (
        {"prompt_string": "a", "multimodal_data": ["aGk="]},
        [5, 10**6],
        [5, "fox " * 10**6],
        [5, [6]],
    ):
        assert httpx.post(f"{url}/embedding", json={"content": text}).status_code == 400


def test_an_answer_has_an_id(url: str) -> None:
    """Mistral's client needs one."""
    assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}).json()["id"].startswith("embd-")


def test_any_model_name(engine: lp.Engine, embedder: lp.Embedder) -> None:
    """llama-server's rule: whatever a client calls the model."""
    with serve(
        engine, settings=ServerSettings(any_model_name=True, ollama=True), embedder=embedder
    ) as server:
        assert (
            httpx.post(f"{server.url}/v1/embeddings", json={"input": "a", "model": "x"}).json()["model"]
            == "bert"
        )
        body = {"model": "gpt-4o", "prompt": "Once", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["model"] == "demo"
        body = {"model": "llama3", "messages": [], "stream": False}
        assert httpx.post(f"{server.url}/api/chat", json=body).status_code == 200


def test_the_list_of_models_says_what_each_is(url: str, engine: lp.Engine, embedder: lp.Embedder) -> None:
    """In llama-server's words, too, which its clients read to divide the context."""
    owners: list[Any] = [engine, embedder]
    for entry, owner in zip(httpx.get(f"{url}/v1/models").json()["data"], owners, strict=True):
        assert entry["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
        assert entry["max_model_len"] == entry["meta"].pop("n_ctx") == owner.n_ctx
        names = ("n_vocab", "n_ctx_train", "n_embd", "n_params")
        sizes = {name: getattr(owner.model, name) for name in names}
        assert entry["meta"] == {**sizes, "size": owner.model.size_bytes}


def test_a_server_that_only_embeds(embedder: lp.Embedder) -> None:
    """It has no engine: what generates says so, the rest works."""
    with http_client(None, embedder=embedder, ollama=True) as client:
        assert len(client.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]) == len(TEXTS)
        for path in (
            "/health",
            "/v1/models",
            "/v1/models/bert",
            "/metrics",
            "/model_info",
            "/api/tags",
            "/api/ps",
        ):
            assert client.get(path).status_code == 200, path
        assert client.post("/api/show", json={"model": "bert"}).json()["capabilities"] == ["embedding"]
        messages = [{"role": "user", "content": "a"}]
        for path, body, status in (
            ("/v1/completions", {"prompt": "a"}, 404),
            ("/v1/chat/completions", {"messages": messages}, 404),
            ("/v1/messages", {"messages": messages, "model": "bert", "max_tokens": 2}, 404),
            ("/v1/responses", {"input": "a"}, 404),
            ("/completion", {"prompt": "a"}, 404),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 404),
            ("/tokenize", {"content": "a"}, 404),
            ("/detokenize", {"tokens": [1]}, 404),
            ("/apply-template", {"messages": messages}, 404),
            ("/api/chat", {"model": "bert", "messages": messages}, 400),
            ("/api/generate", {"model": "other", "prompt": "a"}, 404),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == status, (path, answer.text)
        for path in ("/props", "/slots", "/timeline", "/tokenizer_info"):
            assert client.get(path).status_code == 404, path
    with pytest.raises(TypeError, match="engine"):
        serve(None)  # nothing to serve


@pytest.mark.parametrize("truncate", [True, False])
def test_a_text_that_is_too_long_is_not_tokenized(
    engine: lp.Engine, embedder: lp.Embedder, truncate: bool
) -> None:
    settings = ServerSettings(max_text_characters=3000)
    with serve(engine, embedder=embedder, settings=settings) as server:
        long = "a " * 1500 + "a"
        for value in (long, ["a", long]):
            answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": value, "truncate": truncate})
            assert (answer.status_code, "input: a text has 3001 characters" in answer.text) == (400, True)
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": long[:-1], "truncate": truncate})
        assert (answer.status_code, "3000 characters" in answer.text) == (200 if truncate else 400, False)
        for query, document, name in ((long, "a", "query"), ("a", long, "documents")):
            body = {"query": query, "documents": [document], "truncate": truncate}
            answer = httpx.post(f"{server.url}/v1/rerank", json=body)
            assert (answer.status_code, f"{name}: a text has 3001" in answer.text) == (400, True)


def test_openais_client_gets_the_embedders_vectors(url: str, embedder: lp.Embedder) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="bert", input=TEXTS)  # asks for base64
        floats = client.embeddings.create(model="bert", input=TEXTS, encoding_format="float")
        names = [model.id for model in client.models.list()]
    expected = embedder.embed(TEXTS)
    np.testing.assert_allclose([entry.embedding for entry in answer.data], expected, atol=1e-4)
    np.testing.assert_allclose([entry.embedding for entry in floats.data], expected, atol=1e-4)
    assert answer.usage.prompt_tokens == sum(len(embedder.tokenize(text)) for text in TEXTS)
    assert names == ["demo", "bert"]


def test_each_model_has_its_own_limit(url: str, embedder: lp.Embedder, engine: lp.Engine) -> None:
    limits = {model["id"]: model["max_model_len"] for model in httpx.get(f"{url}/v1/models").json()["data"]}
    assert limits == {"demo": engine.n_ctx, "bert": embedder.n_ctx} and engine.n_ctx != embedder.n_ctx
    for name, limit in limits.items():
        assert httpx.get(f"{url}/v1/models/{name}").json()["max_model_len"] == limit


def test_all_forms_of_input(url: str, embedder: lp.Embedder) -> None:
    tokens = embedder.tokenize("the fox")
    expected = embedder.embed("the fox")
    for value in ("the fox", ["the fox"], tokens, [tokens]):
        body = {"input": value, "encoding_format": "base64"}
        answer = httpx.post(f"{url}/v1/embeddings", json=body).json()
        row = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_normalized(url: str, embedder: lp.Embedder) -> None:
    answer = httpx.post(f"{url}/v1/embeddings", json={"input": "the fox", "dimensions": 8}).json()
    row = embedder.embed("the fox")[:8]
    np.testing.assert_allclose(answer["data"][0]["embedding"], row / np.linalg.norm(row), atol=1e-5)


def test_a_text_may_be_empty(url: str, embedder: lp.Embedder) -> None:
    for value in ("", ["a", ""]):
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": value})
        row = answer.json()["data"][-1]["embedding"]
        np.testing.assert_allclose(row, embedder.embed(""), atol=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [1, [2]]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": "the " * 100}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "unknown": 1}, "unknown"),
        ({}, "input"),
    ],
)
def test_a_bad_field_is_named(url: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_unknown_models_and_servers_without_one(url: str, engine: lp.Engine) -> None:
    assert httpx.post(f"{url}/v1/embeddings", json={"input": "a", "model": "demo"}).status_code == 404
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "model": "bert"}).status_code == 404
    with serve(engine) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 404
        assert "--embeddings" in answer.json()["error"]["message"]


def test_documents_are_ranked(engine: lp.Engine, url: str, tmp_path: Path) -> None:
    path, _ = bert_model(tmp_path / "rank.gguf", "rank", rank_head=True)
    with lp.Embedder(path) as embedder, serve(engine, embedder=embedder) as server:
        body: dict[str, Any] = {"query": "the fox", "documents": TEXTS, "top_n": 3, "return_documents": True}
        answer = httpx.post(f"{server.url}/v1/rerank", json=body).json()
        expected = embedder.rerank("the fox", TEXTS)[:3]
        assert [result["index"] for result in answer["results"]] == [result.index for result in expected]
        assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
            [result.score for result in expected], abs=1e-3
        )
        assert answer["results"][0]["document"]["text"] == TEXTS[expected[0].index]
        everything = httpx.post(f"{server.url}/v1/rerank", json={**body, "top_n": 0}).json()  # in vLLM, all
        assert len(everything["results"]) == len(TEXTS)
        for change in (
            {"top_n": -1},
            {"use_activation": True},
            {"documents": "a"},
            {"documents": [{"a": "b"}]},
            {"query": 3},
        ):
            assert httpx.post(f"{server.url}/v1/rerank", json={**body, **change}).status_code == 400
        long = {**body, "query": "the fox " * 40, "truncate": True}
        error = httpx.post(f"{server.url}/v1/rerank", json=long).json()["error"]
        assert (error["param"], error["code"]) == ("query", "context_length_exceeded")
        cut = {**body, "documents": ["the fox " * 1000], "truncate_prompt_tokens": -1}  # vLLM's truncate
        assert httpx.post(f"{server.url}/v1/rerank", json=cut).status_code == 200
        texts = {"query": "the fox", "texts": TEXTS, "return_text": True}  # Text Embeddings Inference's
        assert httpx.post(f"{server.url}/rerank", json=texts).json()[:3] == [
            {
                "index": result.index,
                "score": pytest.approx(result.score, abs=1e-5),
                "text": TEXTS[result.index],
            }
            for result in expected
        ]
        # Both names ask for the texts, in both formats.
        texts = {"query": "the fox", "texts": TEXTS, "return_documents": True}
        assert [entry["text"] for entry in httpx.post(f"{server.url}/rerank", json=texts).json()[:3]] == [
            TEXTS[ranked.index] for ranked in expected
        ]
        named = {"query": "the fox", "documents": TEXTS, "return_text": True}
        results = httpx.post(f"{server.url}/rerank", json=named).json()["results"]
        assert [entry["document"]["text"] for entry in results[:3]] == [
            TEXTS[ranked.index] for ranked in expected
        ]
        others: tuple[dict[str, Any], ...] = ({"documents": TEXTS}, {"texts": None}, {"raw_scores": False})
        for other in others:
            assert httpx.post(f"{server.url}/rerank", json={**texts, **other}).status_code == 400
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == 400
    assert httpx.post(f"{url}/v1/rerank", json=body).status_code == 400


class TestScores:
    @pytest.mark.parametrize("path", ["/score", "/v1/score"])
    def test_of_one_text_with_several_are_cosines(self, url: str, embedder: lp.Embedder, path: str) -> None:
        for body in (
            {"text_1": TEXTS[0], "text_2": TEXTS[:4]},
            {"queries": TEXTS[0], "documents": TEXTS[:4]},
        ):
            answer = httpx.post(f"{url}{path}", json=body)
            assert answer.status_code == 200, answer.text
            data = answer.json()["data"]
            assert [(entry["index"], entry["object"]) for entry in data] == [(i, "score") for i in range(4)]
            vectors = np.asarray(embedder.embed(TEXTS[:4]))
            assert np.allclose([entry["score"] for entry in data], vectors @ vectors[0], atol=1e-5)
            assert answer.json()["usage"]["prompt_tokens"] > 0

    def test_of_equal_pairs_are_1(self, url: str) -> None:
        answer = httpx.post(f"{url}/score", json={"text_1": TEXTS[:3], "text_2": TEXTS[:3]}).json()
        assert np.allclose([entry["score"] for entry in answer["data"]], 1, atol=1e-5)

    def test_of_a_reranker_are_its_own(self, engine: lp.Engine, tmp_path: Path) -> None:
        path, _ = bert_model(tmp_path / "rank.gguf", "rank", rank_head=True)
        with lp.Embedder(path) as embedder, serve(engine, embedder=embedder) as server:
            expected = {ranked.index: ranked.score for ranked in embedder.rerank("the fox", TEXTS)}
            body: dict[str, Any] = {"text_1": "the fox", "text_2": TEXTS}
            # With AVX-512, batches of other sizes move a score by 6e-5.
            scores = httpx.post(f"{server.url}/score", json=body).json()["data"]
            assert np.allclose(
                [score["score"] for score in scores], [expected[i] for i in range(len(TEXTS))], atol=1e-3
            )
            many = {"text_1": ["the fox"] * 100, "text_2": TEXTS * 10}  # more than run at the same time
            pairs = httpx.post(f"{server.url}/score", json=many, timeout=60).json()["data"]
            assert np.allclose(
                [score["score"] for score in pairs[:10]], [score["score"] for score in scores], atol=1e-3
            )
            assert [score["index"] for score in pairs] == list(range(100))
            cohere = {"query": "the fox", "documents": TEXTS, "top_n": 2, "model": "rank"}
            assert len(httpx.post(f"{server.url}/v2/rerank", json=cohere).json()["results"]) == 2

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"text_1": "a"},
            {"text_1": "a", "queries": "b", "text_2": "c"},
            {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
            {"text_1": ["a", "b"], "text_2": "c"},
            {"text_1": [], "text_2": []},
            {"text_1": "a", "text_2": []},
            {"text_1": 1, "text_2": "a"},
            {"text_1": [1], "text_2": "a"},
            {"text_1": "a", "text_2": "a " * 2000},
            {"text_1": "a", "text_2": "b", "priority": 3},
            {"text_1": "a", "text_2": "b", "typo": 3},
        ],
        ids=str,
    )
    def test_a_wrong_body_is_refused(self, url: str, body: dict[str, Any]) -> None:
        answer = httpx.post(f"{url}/score", json=body)
        assert (answer.status_code, "error" in answer.json()) == (400, True), answer.text


def test_version_and_ping(url: str) -> None:
    assert httpx.get(f"{url}/version").json() == {"version": lp.__version__}
    assert httpx.get(f"{url}/ping").status_code == 200
