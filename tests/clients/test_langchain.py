"""LangChain's standard tests of chat models and embeddings, through its client of OpenAI's API."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from support.chat_templates import template
from support.scripted_model import terse_model
from support.served import TOOLS_TEMPLATE, terse_server

pytest.importorskip("langchain_tests", reason="needs langchain-tests: nox -s clients")
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

from llamapipe.compat import Llama, LlamaGrammar

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def terse_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with terse_server(tmp_path_factory.mktemp("models")) as url:
        yield url


class OnServer:
    """Tests whose client asks the server at ``_url``."""

    _url = ""

    @pytest.fixture(autouse=True)
    def _set_url(self, terse_url: str) -> None:
        type(self)._url = terse_url


def expect_failures(reason: str, *names: str) -> Callable[[type], type]:
    """Marks tests that a class inherits."""

    def mark(tests: type) -> type:
        for name in names:
            inherited = getattr(tests, name)
            own = FunctionType(inherited.__code__, inherited.__globals__, name, closure=inherited.__closure__)
            own.__dict__.update(inherited.__dict__)
            own.__kwdefaults__ = inherited.__kwdefaults__
            setattr(tests, name, pytest.mark.xfail(reason=reason)(own))
        return tests

    return mark


SAYS_OK = "the model of this test says OK unless it is forced to call a tool"
TOOL_TESTS = (
    "test_tool_calling",
    "test_bind_runnables_as_tools",
    "test_tool_calling_with_no_arguments",
    "test_agent_loop",
    "test_unicode_tool_call_integration",
    "test_tool_calling_async",
)


@expect_failures(SAYS_OK, "test_agent_loop")
class TestChatOpenAI(OnServer, ChatModelIntegrationTests):  # type: ignore[misc]
    """All of LangChain's tests but those of images and audio."""

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
            "base_url": f"{self._url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 600,
            "stream_usage": True,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        }


@expect_failures("the model of this test gives JSON of its own where no schema is given", "test_json_mode")
@expect_failures(SAYS_OK, *TOOL_TESTS)
class TestChatOllama(OnServer, ChatModelIntegrationTests):  # type: ignore[misc]
    """The same through LangChain's client of Ollama's API; the tests of tools and JSON pass with Qwen2.5-Coder 1.5B."""

    @property
    def chat_model_class(self) -> Any:
        return ChatOllama

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "terse",
            "base_url": self._url,
            "temperature": 0,
            "num_predict": 600,
            "reasoning": False,
        }

    supports_json_mode = True
    # Ollama's API has no tool_choice, and ChatOllama ignores it.
    has_tool_choice = False


class TestOllamaEmbeddings(OnServer, EmbeddingsIntegrationTests):  # type: ignore[misc]
    """All of LangChain's tests."""

    @property
    def embeddings_class(self) -> Any:
        return OllamaEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "bert", "base_url": self._url}


class TestOpenAIEmbeddings(OnServer, EmbeddingsIntegrationTests):  # type: ignore[misc]
    """All of LangChain's tests."""

    @property
    def embeddings_class(self) -> Any:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "model": "bert",
            "base_url": f"{self._url}/v1",
            "api_key": "none",
            "check_embedding_ctx_length": False,
        }


@pytest.fixture(scope="module")
def terse_llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Stands for llama_cpp. One ``Llama`` is shared: ChatLlamaCpp has no close."""
    path = terse_model(tmp_path_factory.mktemp("models") / "terse.gguf", template(TOOLS_TEMPLATE).text)
    with Llama(path, n_ctx=8192, verbose=False, template_args={"enable_thinking": False}) as llama:
        yield SimpleNamespace(Llama=lambda *_, **__: llama, LlamaGrammar=LlamaGrammar)


@expect_failures(SAYS_OK, "test_structured_few_shot_examples", *TOOL_TESTS)
class TestChatLlamaCpp(ChatModelIntegrationTests):  # type: ignore[misc]
    """LangChain's class for llama-cpp-python, over ``llamapipe.compat``."""

    @pytest.fixture(autouse=True)
    def _compat(self, terse_llama: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llama_cpp", terse_llama)

    @property
    def chat_model_class(self) -> Any:
        from langchain_community.chat_models import ChatLlamaCpp

        return ChatLlamaCpp

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model_path": "terse.gguf", "temperature": 0, "max_tokens": 600}

    # What ChatLlamaCpp itself does not have, whatever is beneath.
    has_tool_choice = False
    returns_usage_metadata = False

    @pytest.mark.xfail(reason="ChatLlamaCpp does not tell callbacks about its format")
    @pytest.mark.parametrize("schema_type", ["pydantic"])
    def test_structured_output(self, model: Any, schema_type: str) -> None:
        super().test_structured_output(model, schema_type)

    @pytest.mark.xfail(reason="ChatLlamaCpp does not tell callbacks about its format")
    @pytest.mark.parametrize("schema_type", ["pydantic"])
    async def test_structured_output_async(self, model: Any, schema_type: str) -> None:
        await super().test_structured_output_async(model, schema_type)
