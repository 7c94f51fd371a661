"""Names of llama-cpp-python: constants, attributes that are missing, `sys.modules["llama_cpp"]`."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.run_script import run_script, run_script_with_errors

import llamapipe as lp
from llamapipe import compat
from llamapipe.compat import Llama, LlamaDiskCache, LlamaRAMCache
from llamapipe.compat.options import CONSTANTS
from llamapipe.native.load import enum_names

PAGES = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with Llama(lp.demo_model_path(), verbose=False) as llm:
        yield llm


class TestConstants:
    @pytest.mark.parametrize("enum", ["ggml_type", "llama_pooling_type", "llama_split_mode"])
    def test_they_are_those_of_the_bindings(self, enum: str) -> None:
        native = {name: number for number, name in enum_names(enum).items()}
        prefix = f"{enum.upper()}_"
        ours = {name: number for name, number in CONSTANTS.items() if name.startswith(prefix)}
        assert ours and ours == {name: native[name] for name in ours}

    def test_the_constructor_takes_them(self) -> None:
        options: list[dict[str, Any]] = [
            {"type_k": compat.GGML_TYPE_Q8_0, "type_v": compat.GGML_TYPE_F16},
            {"split_mode": compat.LLAMA_SPLIT_MODE_NONE},
            {"rope_scaling_type": compat.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED},
        ]
        for arguments in options:
            Llama(lp.demo_model_path(), vocab_only=True, **arguments).close()
        with pytest.raises(
            ValueError, match="rope_scaling is 'yarn', and neither rope_freq_scale nor the file"
        ):
            Llama(lp.demo_model_path(), rope_scaling_type=compat.LLAMA_ROPE_SCALING_TYPE_YARN)

    def test_completion_shows_them_and_the_reference_has_them(self) -> None:
        assert set(CONSTANTS) | set(compat.__all__) | {"__version__"} == set(dir(compat))
        named: set[str] = set()
        page = (PAGES / "reference" / "extras.md").read_text(encoding="utf-8")
        for row in re.findall(r"^\| `.*$", page, re.MULTILINE):
            prefix = ""
            for name in re.findall(r"`(\w+)`", row.split("|")[2]):
                known = re.match(r"(?:GGML_TYPE|LLAMA_[A-Z_]+?_(?:TYPE|MODE))(?=_)", name)
                prefix = known[0] if known else prefix
                named.add(name if known else prefix + name)
        assert named == set(CONSTANTS)

    def test_a_misspelt_name(self) -> None:
        with pytest.raises(AttributeError, match="did you mean GGML_TYPE_Q8_0"):
            _ = compat.GGML_TYPE_Q8
        with pytest.raises(ImportError, match="LlamaGrammer"):
            exec("from llamapipe.compat import LlamaGrammer")

    @pytest.mark.parametrize(
        ("code", "error", "message"),
        [
            (
                "from llama_cpp.llama_types import ChatCompletionRequestUserMessage",
                "ImportError",
                "plain dicts",
            ),
            (
                "from llama_cpp.llama_speculative import LlamaPromptLookupDecoding",
                "ImportError",
                "draft_model",
            ),
            ("from llama_cpp.llama_chat_format import Llava15ChatHandler", "ImportError", "chat_format"),
            ("from llama_cpp.llama_cpp import llama_decode", "ImportError", "llamapipe.Pipeline"),
            ("import llama_cpp; llama_cpp.llama_decode", "AttributeError", "llamapipe.Pipeline"),
            ("from llama_cpp import llama_decode", "ImportError", "llamapipe.Pipeline"),
            ("from llama_cpp import llama_supports_gpu_offload", "ImportError", "llamapipe doctor"),
            ("from llama_cpp import ChatCompletionRequestMessage", "ImportError", "plain dicts"),
            ("from llama_cpp import LlamaGrammer", "ImportError", "did you mean LlamaGrammar"),
            ("from llama_cpp import LLAMA_DEFAULT_SEED", "ImportError", "leave seed out"),
            ("from llama_cpp.llama_chat_format import Qwen25VLChatHandler", "ImportError", "mmproj"),
            (
                "from llama_cpp.llama_tokenizer import LlamaHFTokenizer",
                "ImportError",
                "the model file's tokenizer",
            ),
            ("import llama_cpp; llama_cpp.LlamaPromptLookupDecoding", "AttributeError", "draft_model"),
        ],
    )
    def test_names_that_are_not_here_say_what_to_use(self, code: str, error: str, message: str) -> None:
        replaced = "import sys\nfrom llamapipe import compat\nsys.modules['llama_cpp'] = compat\n"
        said = run_script(f"{replaced}try:\n    exec({code!r})\nexcept {error} as e:\n    print(e)\n")
        assert message in said

    def test_modules_have_the_names_that_programs_import_from_them(self) -> None:
        said = run_script(
            "import sys\nfrom llamapipe import compat\nsys.modules['llama_cpp'] = compat\n"
            "from llama_cpp.llama import Llama, LlamaState, LogitsProcessorList, StoppingCriteriaList\n"
            "from llama_cpp.llama_grammar import LlamaGrammar\nfrom llama_cpp.llama_cache import LlamaRAMCache\n"
            "from llama_cpp.llama_tokenizer import LlamaTokenizer\nfrom llama_cpp import llama_chat_format\n"
            "print(LlamaGrammar is compat.LlamaGrammar, LogitsProcessorList is compat.LogitsProcessorList,\n"
            "      hasattr(compat, 'llama_decode'))"
        )
        assert said == "True True False\n"

    def test_no_library_is_loaded_for_them(self) -> None:
        said = run_script(
            "import sys\nfrom llamapipe.compat import GGML_TYPE_Q8_0\n"
            "print(GGML_TYPE_Q8_0, 'llamapipe.native._native' in sys.modules)"
        )
        assert said == "8 False\n"


class TestAttributes:
    def test_those_that_exist(self, llm: Any) -> None:
        assert llm.cache is None and llm.chat_handler is None
        assert llm.tokenizer_ is llm.tokenizer()
        assert LlamaRAMCache(5).cache_size == 0

    def test_arguments_of_the_constructor(self) -> None:
        with Llama(lp.demo_model_path(), vocab_only=True, n_batch=64, lora_scale=0.5, spm_infill=True) as llm:
            kept: Any = llm
            assert (kept.n_batch, kept.lora_scale, kept.spm_infill, kept.tensor_split) == (
                64,
                0.5,
                True,
                None,
            )
            with pytest.raises(AttributeError, match=r"no 'n_threads' here: .*stats\(\)\.n_threads"):
                _ = kept.n_threads

    @pytest.mark.parametrize("name", ["context_params", "model_params", "_scores", "_ctx", "_batch"])
    def test_those_that_are_missing(self, llm: Any, name: str) -> None:
        with pytest.raises(AttributeError, match=rf"no '{name}' here: .* use "):
            getattr(llm, name)
        assert not hasattr(llm, name)

    def test_others(self, llm: Any) -> None:
        llm.eval(llm.tokenize(b"Once"))
        state = llm.save_state()
        with pytest.raises(AttributeError, match=r"scores.*Llama\.engine\.score"):
            _ = state.scores
        with pytest.raises(AttributeError, match="cache_state"):
            _ = LlamaRAMCache().cache_state  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="'tokenise'; did you mean tokenize"):
            _ = llm.tokenise
        assert pickle.loads(pickle.dumps(state)) == copy.deepcopy(state) == state

    def test_a_property_that_fails_keeps_its_error(self) -> None:
        with pytest.raises(AttributeError, match="_cache"):
            _ = Llama.__new__(Llama).cache

    def test_the_cache_on_disk(self) -> None:
        with pytest.raises(NotImplementedError, match="not supported: prefixes are cached in memory"):
            LlamaDiskCache("folder")


def test_a_library_that_imports_llama_cpp() -> None:
    said = run_script(
        "import sys\nimport llamapipe as lp\nimport llamapipe.compat\n"
        "sys.modules['llama_cpp'] = llamapipe.compat\n"
        "import llama_cpp\nfrom llama_cpp import Llama, LogitsProcessor\n"
        "llm = Llama(str(lp.demo_model_path()), type_k=llama_cpp.GGML_TYPE_Q8_0, flash_attn=True)\n"
        "print(llama_cpp.__version__, llm('1, 2, 3,', max_tokens=2, temperature=0)['choices'][0]['text'])"
    )
    assert said == f"{compat.__version__}  4,\n"


@pytest.mark.skipif(find_spec("langchain_community") is None, reason="needs langchain-community")
class TestLangChain:
    def test_the_program_of_the_page(self) -> None:
        page = (PAGES / "coming-from" / "llama-cpp-python.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        (program,) = [block for block in blocks if "langchain_community" in block]
        expected = re.search(r"\.content\)  # (.*)", program)
        assert expected and run_script_with_errors(program)[0] == f"{expected[1]}\n"

    def test_embeddings_and_completions(self) -> None:
        said, _ = run_script_with_errors(
            "import sys\nimport llamapipe as lp\nimport llamapipe.compat\n"
            "sys.modules['llama_cpp'] = llamapipe.compat\n"
            "from langchain_community.embeddings import LlamaCppEmbeddings\n"
            "from langchain_community.llms import LlamaCpp\n"
            "path = str(lp.demo_model_path())\n"
            "embeddings = LlamaCppEmbeddings(model_path=path, verbose=False)\n"
            "print(len(embeddings.embed_query('hello there')))\n"
            "print(LlamaCpp(model_path=path, temperature=0, max_tokens=4, verbose=False).invoke('1, 2, 3,'))"
        )
        assert said == "192\n 4, 5,\n"
