"""What llama.cpp and ggml log goes to ``logging``, under ``llamapipe.native``, and never to the terminal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.bert_model import bert_model
from support.gguf_document import Document
from support.gguf_models import tiny_model
from support.run_script import run_script

import llamapipe as lp
from llamapipe.native.load import drain_log, native

LOGGER = "llamapipe.native"

# Loads, computes, and makes llama.cpp log warnings and errors.
_WORK = """
import llamapipe as lp
from llamapipe.llama import Context

def work(path):
    with lp.Model(path) as model:
        try:
            Context(model, type_k="q8_0")
        except lp.errors.BackendError as e:
            say("refused")
        with lp.Engine(model, n_ctx=4 * model.n_ctx_train, n_seq_max=2) as engine:
            say(len(engine.generate(["one", "two"], lp.SamplingParams(max_tokens=5, ignore_eos=True))))
    try:
        lp.Model(path + ".missing")
    except lp.errors.ModelLoadError:
        say("missing")
"""


def test_nothing_reaches_the_terminal(tiny: lp.Model) -> None:
    # run_script fails for anything on stderr.
    out = run_script(_WORK + "work(sys.argv[1])", tiny.path)
    assert out.splitlines() == ["refused", "2", "missing"]


def test_nothing_reaches_the_terminal_when_only_errors_are_wanted_there(tiny: lp.Model) -> None:
    run_script(
        _WORK + "import logging; logging.basicConfig(level=logging.CRITICAL); work(sys.argv[1])", tiny.path
    )


def test_a_program_that_configures_logging_sees_the_warnings(tiny: lp.Model) -> None:
    out = run_script(
        _WORK
        + """
import logging
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
work(sys.argv[1])
""",
        tiny.path,
    )
    lines = [line for line in out.splitlines() if "llamapipe" in line]
    assert any(line.startswith(f"WARNING {LOGGER} ") and "n_ctx_train" in line for line in lines), out
    assert any(line.startswith(f"ERROR {LOGGER} ") and "n_embd_head_k" in line for line in lines), out


def test_levels_of_records(tiny: lp.Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    with lp.Model(tiny.path) as model:
        loading = [r for r in caplog.records if r.name == LOGGER]
        caplog.clear()
        with lp.Engine(model, n_ctx=2 * model.n_ctx_train, n_seq_max=1, n_threads=1):
            pass
    assert any("llama_model_loader" in r.getMessage() for r in loading)
    # llama.cpp's INFO is a page for every model: no library should do that to a program's log.
    assert {r.levelno for r in loading} == {logging.DEBUG}
    assert {r.levelno for r in caplog.records if r.name == LOGGER} == {logging.DEBUG, logging.WARNING}
    for record in [*loading, *caplog.records]:
        text = record.getMessage()
        assert text == text.rstrip()
        assert text.strip(".")


def test_texts_with_percent_signs_are_no_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    path = tiny_model(tmp_path / "100%s %d %(name)s.gguf")
    with lp.Model(path):
        pass
    assert any("100%s %d %(name)s" in r.getMessage() for r in caplog.records)


def test_long_texts_are_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The ring that native records wait in has 512 bytes for each; a cut character is replaced."""
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    folder = tmp_path / ("\N{SNOWMAN}" * 80) / ("\N{SNOWMAN}" * 80) / ("\N{SNOWMAN}" * 80)
    folder.mkdir(parents=True)
    with lp.Model(tiny_model(folder / "tiny.gguf")):
        pass
    texts = [r.getMessage() for r in caplog.records]
    assert any("\N{SNOWMAN}" * 80 in text for text in texts)
    assert max(len(text.encode()) for text in texts) <= 512 + 2  # U+FFFD is longer than the byte it replaces


def test_errors_carry_what_was_logged(tiny: lp.Model) -> None:
    with pytest.raises(lp.errors.BackendError, match=r"type q8_0 .* does not divide n_embd_head_k=16"):
        lp.Engine(tiny, type_k="q8_0")


def test_an_error_tells_its_own_reason_not_an_earlier_one(tiny: lp.Model) -> None:
    for bad_type in ("q8_0", "q4_0"):
        with pytest.raises(lp.errors.BackendError) as caught:
            lp.Engine(tiny, type_k=bad_type)
        others = {"q8_0", "q4_0"} - {bad_type}
        assert bad_type in str(caught.value)
        assert not any(other in str(caught.value) for other in others)


def test_a_pooling_is_no_news_for_a_model_without_a_default(
    demo: lp.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    with lp.Embedder(demo, pooling="last", n_ctx=256):
        drain_log(native())
    (record,) = [r for r in caplog.records if "pooling_type is [-1]" in r.getMessage()]
    assert record.levelno == logging.DEBUG
    caplog.clear()
    with lp.Embedder(bert_model(tmp_path / "bert.gguf")[0], pooling="cls"):
        drain_log(native())
    (record,) = [r for r in caplog.records if "default pooling_type" in r.getMessage()]
    assert record.levelno == logging.WARNING


def test_the_reason_of_a_failed_load_is_an_error_not_a_warning_before_it(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "tiny.gguf")
    document = Document.read(path)
    tokens, kinds = (document.entry(f"tokenizer.ggml.{name}").value for name in ("tokens", "token_type"))
    kinds[tokens.index(b"</s>")] = 1  # a normal token: llama.cpp warns, and takes it for a control token
    document.write(path)
    with lp.Model(path):
        pass
    document.tensors = [t for t in document.tensors if t.name != b"blk.0.ffn_norm.weight"]
    document.write(path)
    with pytest.raises(lp.errors.ModelLoadError) as caught:
        lp.Model(path)
    assert "ffn_norm" in str(caught.value)
    assert "control-looking" not in str(caught.value)


def test_a_token_whose_type_llama_cpp_mends_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model(tmp_path / "tiny.gguf")
    document = Document.read(path)
    document.entry("tokenizer.ggml.tokens").value[-1] = b"<|eot_id|>"
    document.write(path)
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    with lp.Model(path):
        drain_log(native())
    (record,) = [
        r for r in caplog.records if "<|eot_id|>" in r.getMessage() and "type will be" in r.getMessage()
    ]
    assert record.levelno == logging.DEBUG
