"""Model, Vocab, and DecodeBatch on their own: what they do, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.bad_values import CHOICES, FLAGS, INF, INTEGERS, NAN, TOKENS, Bad, names

import llamapipe as lp
from llamapipe.errors import BackendError, EngineClosedError, InvalidRequestError
from llamapipe.llama import Context, DecodeBatch

TEXTS = [
    "",
    " ",
    "a",
    "hello world",
    "nul\0nul\0\0",
    "\N{SNOWMAN} \N{GRINNING FACE}",
    "\n\t\r",
    "x" * 3000,
    "e\u0301",
]


# ---- Model and Vocab
def test_a_model_tells_what_its_file_says(tiny: lp.Model) -> None:
    metadata = tiny.metadata
    assert metadata["general.architecture"] == "llama"
    assert tiny.n_embd == int(metadata["llama.embedding_length"]) == 64
    assert tiny.n_layer == int(metadata["llama.block_count"]) == 2
    assert tiny.n_ctx_train == int(metadata["llama.context_length"]) == 512
    assert tiny.n_vocab == tiny.vocab.n_vocab == 512
    assert tiny.n_params > 50_000
    assert 0 < tiny.size_bytes < tiny.path.stat().st_size
    assert not tiny.closed
    assert not tiny.is_recurrent
    assert repr(tiny).startswith("<Model 'tiny.gguf' n_params=")


def test_the_shipped_model_has_a_chat_template(demo: lp.Model) -> None:
    assert demo.chat_template is not None
    assert "message" in demo.chat_template
    assert demo.eos is not None
    assert demo.is_eog(demo.eos)


def test_devices_have_a_processor() -> None:
    devices = lp.devices()
    cpu = next(device for device in devices if device.type == "cpu")
    assert cpu.memory_total >= cpu.memory_free > 0
    assert cpu.name
    assert cpu.backend


@pytest.mark.parametrize("text", TEXTS)
def test_text_to_tokens_and_back(demo: lp.Model, tiny: lp.Model, text: str) -> None:
    for model in (demo, tiny):
        ids = model.tokenize(text, add_special=False)
        assert all(0 <= i < model.n_vocab for i in ids)
        assert b"".join(map(model.piece, ids)).decode() in (text, " " + text)  # some vocabularies add a space
        with_special = model.tokenize(text)
        assert with_special == [model.bos, *ids]


def test_a_text_that_begins_with_bos_gets_no_second_one(demo: lp.Model) -> None:
    bos = demo.vocab.bos
    assert bos is not None
    written = demo.vocab.detokenize([bos], unparse_special=True)
    assert demo.tokenize(written + "hello", parse_special=True).count(bos) == 1
    assert (
        demo.tokenize(written + "hello", parse_special=False).count(bos) == 1
    )  # plain text to a user's prompt


def test_control_tokens_have_no_bytes(demo: lp.Model) -> None:
    control = [t for t in range(demo.n_vocab) if demo.vocab.is_control(t)]
    assert control
    assert {demo.piece(t) for t in control} == {b""}
    assert demo.detokenize(control) == ""


def test_bytes_that_form_no_character_are_replaced(tiny: lp.Model) -> None:
    ids = tiny.tokenize("\N{SNOWMAN}", add_special=False)
    lone = ids[-1]
    assert len(tiny.piece(lone)) == 1
    assert tiny.detokenize([lone]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\udc80\udc81"])
def test_lone_surrogates_are_refused(tiny: lp.Model, text: str) -> None:
    with pytest.raises(ValueError, match=r"^text has a lone surrogate at \d"):
        tiny.tokenize(text)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["list"], 1.5, bytearray(b"x")])
def test_text_must_be_a_str(tiny: lp.Model, text: Any) -> None:
    with pytest.raises(TypeError, match=r"^text must be str, not "):
        tiny.tokenize(text)


@pytest.mark.parametrize("flag", FLAGS, ids=names)
def test_flags_of_text_functions(tiny: lp.Model, flag: Bad) -> None:
    calls: list[tuple[str, Callable[[], object]]] = [
        ("add_special", lambda: tiny.tokenize("x", add_special=flag.value)),
        ("parse_special", lambda: tiny.tokenize("x", parse_special=flag.value)),
        ("remove_special", lambda: tiny.vocab.detokenize([5], remove_special=flag.value)),
        ("unparse_special", lambda: tiny.vocab.detokenize([5], unparse_special=flag.value)),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=rf"^{name} must be True or False, not "):
            call()


@pytest.mark.parametrize("bad", [*TOKENS, Bad("5", TypeError)], ids=names)
def test_bad_ids_to_detokenize(tiny: lp.Model, bad: Bad) -> None:
    with pytest.raises(bad.error, match=r"^ids (contains|must be)"):
        tiny.detokenize(bad.value)


@pytest.mark.parametrize("bad", [*INTEGERS, Bad(-1, ValueError), Bad(512, ValueError)], ids=names)
def test_bad_single_tokens(tiny: lp.Model, bad: Bad) -> None:
    for good in (1, np.int64(1), np.uint8(1)):
        assert tiny.piece(good) == b""  # BOS; now in the cache, where 1.0 and True would find it too
    for function in (tiny.piece, tiny.is_eog, tiny.vocab.is_control):
        with pytest.raises(bad.error, match=r"^token (is|must be)"):
            function(bad.value)


def test_a_model_of_a_vocabulary_only(tiny: lp.Model) -> None:
    with lp.Model(tiny.path, vocab_only=True) as model:
        assert model.tokenize("hello") == tiny.tokenize("hello")
        with pytest.raises(InvalidRequestError, match="vocab_only=True; a context needs its weights"):
            Context(model)
        with pytest.raises(InvalidRequestError, match="vocab_only"):
            lp.Engine(model)


# ---- Model: options
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n_gpu_layers", [*INTEGERS, Bad(-2, ValueError)]),
        ("main_gpu", [*INTEGERS, Bad(-1, ValueError), Bad(1024, ValueError)]),
        ("split_mode", CHOICES),
        ("use_mmap", FLAGS),
        ("use_mlock", FLAGS),
        ("vocab_only", FLAGS),
        ("kernels", CHOICES),
        ("progress", [Bad(value, TypeError) for value in (5, "x", True, [print])]),
        ("devices", [Bad(value, TypeError) for value in ("CPU", 5, [5], [None], {"CPU"}, True)]),
        ("tensor_split", [Bad(value, TypeError) for value in ("1", 5, ["1"], [None], [True])]),
        ("tensor_split", [Bad(value, ValueError) for value in ([NAN], [-1.0], [INF], [1.0] * 1000)]),
        ("path", [Bad(value, TypeError) for value in (None, 5, 1.5, ["x"], object())]),
    ],
)
def test_bad_options_of_a_model(tiny: lp.Model, name: str, values: list[Bad]) -> None:
    for bad in values:
        with pytest.raises(bad.error, match=f"^{name} (is|has|must)"):
            lp.Model(**{"path": tiny.path, name: bad.value})


def test_options_nobody_knows_are_errors(tiny: lp.Model) -> None:
    makers: list[tuple[Callable[..., object], object]] = [
        (lp.Model, tiny.path),
        (Context, tiny),
        (lp.Engine, tiny),
    ]
    for make, what in makers:
        with pytest.raises(TypeError, match="n_ctxx"):
            make(what, n_ctxx=5)


def test_a_device_that_is_not_there(tiny: lp.Model) -> None:
    with pytest.raises(BackendError, match=r"there is no device 'NPU7'; this build and machine have: .*CPU"):
        lp.Model(tiny.path, devices=["NPU7"])


@pytest.mark.parametrize(
    "options",
    [
        {"use_mmap": False},
        {"use_mmap": True, "n_gpu_layers": 0},
        {"devices": []},
        {"split_mode": "none", "n_gpu_layers": 0},
        {"split_mode": "row"},
        {"tensor_split": [1, 2.5]},
        {"tensor_split": []},
        {"n_gpu_layers": 2**31 - 1},
    ],
    ids=str,
)
def test_unusual_options_of_a_model(tiny: lp.Model, options: dict[str, Any]) -> None:
    with lp.Model(str(tiny.path), **options) as model, Context(model, n_ctx=64, n_threads=1) as context:
        context.decode(DecodeBatch.of_tokens([5, 6]))
        assert np.isfinite(context.logits(1)).all()


# ---- lifetime
def test_use_of_a_model_after_close(tiny: lp.Model) -> None:
    model = lp.Model(tiny.path)
    vocab = model.vocab
    ids = model.tokenize("hello")
    assert vocab.piece(ids[1])
    model.close()
    model.close()
    assert model.closed
    assert repr(model) == "<Model 'tiny.gguf' closed>"
    uses: list[Callable[[], object]] = [
        lambda: model.handle,
        lambda: model.tokenize("hello"),
        lambda: model.detokenize(ids),
        lambda: model.piece(ids[1]),
        lambda: model.metadata,
        lambda: model.chat_template,
        lambda: vocab.handle,
        lambda: vocab.tokenize("hello"),
        lambda: vocab.detokenize(ids),
        lambda: vocab.piece(ids[1]),
        lambda: vocab.is_control(ids[1]),
        lambda: Context(model),
        lambda: lp.Engine(model),
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match="model is closed; load it again"):
            use()


# ---- DecodeBatch
def test_a_batch_copies_and_cannot_be_changed() -> None:
    tokens = np.array([5, 6], np.int32)
    batch = DecodeBatch(tokens, [0, 1], [0, 0], [False, True])
    tokens[:] = 9999
    assert batch.tokens.tolist() == [5, 6]
    assert batch.rows == [1]
    assert repr(batch) == "<DecodeBatch n_tokens=2 n_outputs=1>"
    with pytest.raises(ValueError, match="read-only"):
        batch.tokens[0] = 9999
    for name in ("tokens", "outputs"):
        with pytest.raises(AttributeError, match=f"create another one to change {name}"):
            setattr(batch, name, np.array([1], np.int8))
    for same in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert same.tokens.tolist() == [5, 6]
        assert same.rows == [1]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1.0], TypeError, "must hold integers, not float64"),
        (["1"], TypeError, "must hold integers, not <U1"),
        ([True], TypeError, "must hold integers, not bool"),
        ([None], TypeError, "must hold integers, not object"),
        ([[1]], TypeError, r"must be a one-dimensional sequence of integers, not list of shape \(1, 1\)"),
        ([1, [2]], TypeError, "must be a one-dimensional sequence of integers"),
        ("1", TypeError, "must be a one-dimensional sequence of integers, not str of shape"),
        (b"1", TypeError, "must be a one-dimensional sequence of integers, not bytes of shape"),
        (None, TypeError, "must be a one-dimensional sequence of integers, not NoneType of shape"),
        (5, TypeError, "must be a one-dimensional sequence of integers, not int of shape"),
        ({1: 2}, TypeError, "must be a one-dimensional sequence of integers, not dict of shape"),
        ([2**31], ValueError, "holds values outside int32"),
        ([-(2**31) - 1], ValueError, "holds values outside int32"),
        ([2**64], ValueError, "holds values outside int32"),
        (np.array([2**63], np.uint64), ValueError, "holds values outside int32"),
    ],
)
@pytest.mark.parametrize("name", ["tokens", "positions", "seq_ids"])
def test_bad_entries_of_a_batch(name: str, values: Any, error: type[Exception], message: str) -> None:
    entries: dict[str, Any] = {"tokens": [1], "positions": [0], "seq_ids": [0], "outputs": [True]}
    with pytest.raises(error, match=f"^{name} {message}"):
        DecodeBatch(**{**entries, name: values})


@pytest.mark.parametrize("outputs", [[1.0], ["1"], [None], [[True]], "1", None, True])
def test_bad_outputs_of_a_batch(outputs: Any) -> None:
    with pytest.raises(TypeError, match=r"^outputs must "):
        DecodeBatch([1], [0], [0], outputs)


def test_a_batch_of_nothing_or_of_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        DecodeBatch([], [], [], [])
    with pytest.raises(ValueError, match="at least one token"):
        DecodeBatch.of_tokens([])
    for name in ("positions", "seq_ids", "outputs"):
        entries: dict[str, Any] = {
            "tokens": [1, 2],
            "positions": [0, 1],
            "seq_ids": [0, 0],
            "outputs": [0, 1],
        }
        with pytest.raises(ValueError, match=f"^{name} has 1 entries and tokens has 2"):
            DecodeBatch(**{**entries, name: entries[name][:1]})


@pytest.mark.parametrize("bad", [*INTEGERS, Bad(-1, ValueError)], ids=names)
def test_bad_places_of_a_run_of_tokens(bad: Bad) -> None:
    with pytest.raises(bad.error, match=r"^first_position (is|must be)"):
        DecodeBatch.of_tokens([1], bad.value)
    with pytest.raises(bad.error, match=r"^seq_id (is|must be)"):
        DecodeBatch.of_tokens([1], 0, bad.value)
