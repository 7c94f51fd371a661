"""LangChain's standard tests of chat models and embeddings, through its client of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.served import terse_server

pytest.importorskip("langchain_tests", reason="needs langchain-tests: nox -s clients")
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def terse_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with terse_server(tmp_path_factory.mktemp("models")) as url:
        yield url


class TestChatOpenAI(ChatModelIntegrationTests):  # type: ignore[misc]
    """All of LangChain's tests but those of images and audio."""

    @pytest.fixture(autouse=True)
    def _url(self, terse_url: str) -> None:
        type(self)._terse_url = terse_url

    _terse_url = ""

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "terse",
            "base_url": f"{self._terse_url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 600,
            "stream_usage": True,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        }

    @pytest.mark.xfail(reason="the model of this test says OK unless it is forced to call a tool")
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):  # type: ignore[misc]
    """All of LangChain's tests."""

    @pytest.fixture(autouse=True)
    def _url(self, terse_url: str) -> None:
        type(self)._server_url = terse_url

    _server_url = ""

    @property
    def embeddings_class(self) -> Any:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "model": "bert",
            "base_url": f"{self._server_url}/v1",
            "api_key": "none",
            "check_embedding_ctx_length": False,
        }
