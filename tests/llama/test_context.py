"""Context on its own: what it computes, what it refuses, and how it ends."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bad_values import CHOICES, FLAGS, INTEGERS, Bad, names
from support.control import Worker, wait_until
from support.gguf_models import Shape, make_model, not_causal_model
from support.inside import forget_children
from support.run_script import run_script

import llamapipe as lp
import llamapipe.llama.context as context_module
from llamapipe._options import ENGINE
from llamapipe.errors import BackendError, ContextFullError, EngineClosedError
from llamapipe.host.memory import memory_limit
from llamapipe.llama import Context, DecodeBatch
from llamapipe.llama.context import CACHE_TYPES
from llamapipe.native.load import native

pytestmark = pytest.mark.native

MOST = {row.name: int(row.high) for row in ENGINE}
MakeContext = Callable[..., Context]


def cpu_ns(tid: str) -> int:
    """What a thread of this process has computed."""
    return int(Path(f"/proc/self/task/{tid}/schedstat").read_text().split()[0])


def asleep(tid: str) -> bool:
    """Whether a thread of this process sleeps."""
    return Path(f"/proc/self/task/{tid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.fixture
def make_context(tiny: lp.Model) -> Iterator[MakeContext]:
    contexts: list[Context] = []

    def make(**options: Any) -> Context:
        contexts.append(Context(tiny, **{"n_ctx": 64, "n_threads": 1, **options}))
        return contexts[-1]

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def context(make_context: MakeContext) -> Context:
    return make_context(n_seq_max=3)


@pytest.fixture(params=[False, True], ids=["streams", "unified"])
def either(request: pytest.FixtureRequest, make_context: MakeContext) -> Context:
    """A context of each KV mode."""
    return make_context(n_seq_max=3, kv_unified=request.param)


def logits_after(context: Context, tokens: list[int], seq_id: int = 0) -> Any:
    """Feeds the tokens to a sequence and returns the logits of the last one."""
    context.decode(DecodeBatch.of_tokens(tokens, context.seq_pos_max(seq_id) + 1, seq_id))
    return context.logits(len(tokens) - 1)


# ---- Context: what it computes
def test_rows_are_those_that_were_asked_for(context: Context) -> None:
    tokens = [5, 6, 7, 8]
    context.decode(DecodeBatch.of_tokens(tokens, all_outputs=True))
    every = [context.logits(i) for i in range(4)]
    context.clear()
    context.decode(DecodeBatch(tokens, range(4), [0] * 4, [0, 1, 0, 1]))
    for i in (1, 3):
        np.testing.assert_array_equal(context.logits(i), every[i])
    for i in (0, 2, 4, 63):
        with pytest.raises(ValueError, match=f"^entry {i} of the last batch is not an output"):
            context.logits(i)
    assert context.logits(3).dtype == np.float32
    assert context.logits(3).shape == (512,)
    assert context.logits(3) is not context.logits(3)


def test_a_batch_without_outputs(context: Context) -> None:
    context.decode(DecodeBatch([5, 6], [0, 1], [0, 0], [False, False]))
    with pytest.raises(ValueError, match="not an output"):
        context.logits(1)
    with_pause = logits_after(context, [7])
    context.clear()
    np.testing.assert_allclose(logits_after(context, [5, 6, 7]), with_pause, atol=2e-3)


def test_logits_before_anything_was_decoded(context: Context) -> None:
    with pytest.raises(ValueError, match="not an output"):
        context.logits(0)


def test_removed_positions_are_computed_again_alike(either: Context) -> None:
    first = logits_after(either, [5, 6, 7])
    assert either.seq_remove(0, 1)
    assert either.seq_pos_max(0) == 0
    np.testing.assert_allclose(logits_after(either, [6, 7]), first, atol=2e-3)
    either.seq_remove(0, 1)
    assert np.abs(logits_after(either, [9, 7]) - first).max() > 0.05


def test_a_copied_sequence_goes_on_by_itself(either: Context) -> None:
    logits_after(either, [5, 6, 7])
    either.seq_copy(0, 2)
    assert [either.seq_pos_max(i) for i in range(3)] == [2, -1, 2]
    either.seq_remove(0)
    after_copy = logits_after(either, [8], seq_id=2)
    either.clear()
    assert [either.seq_pos_max(i) for i in range(3)] == [-1, -1, -1]
    np.testing.assert_allclose(logits_after(either, [5, 6, 7, 8]), after_copy, atol=2e-3)


def test_sequences_do_not_see_each_other(either: Context) -> None:
    alone = logits_after(either, [5, 6, 7])
    either.clear()
    logits_after(either, [9, 10, 11, 12], seq_id=1)
    np.testing.assert_allclose(logits_after(either, [5, 6, 7]), alone, atol=2e-3)


def test_a_full_unified_cache_changes_nothing(make_context: MakeContext) -> None:
    context = make_context(n_ctx=200, n_seq_max=3, n_cells=256, kv_unified=True)
    logits_after(context, [5] * 200)
    with pytest.raises(ContextFullError, match="no KV cells are left for 100 tokens; remove sequences or"):
        logits_after(context, [5] * 100, seq_id=1)
    assert [context.seq_pos_max(i) for i in range(3)] == [199, -1, -1]
    context.seq_remove(0)
    logits_after(context, [5] * 100, seq_id=1)


# ---- Context: what it refuses
@pytest.mark.parametrize(
    ("tokens", "positions", "seq_ids", "message"),
    [
        ([512], [2], [0], r"^tokens holds 512; it must be from 0 to 511$"),
        ([-1], [2], [0], r"^tokens holds -1; it must be from 0 to 511$"),
        ([2**31 - 1], [2], [0], r"^tokens holds 2147483647"),
        ([5], [2], [3], r"^seq_ids holds 3; it must be from 0 to 2$"),
        ([5], [2], [-1], r"^seq_ids holds -1; it must be from 0 to 2$"),
        ([5], [3], [0], r"^positions of sequence 0 must continue from 2 without gaps, not \[3\]"),
        ([5], [1], [0], r"^positions of sequence 0 must continue from 2"),
        ([5], [-1], [0], r"^positions of sequence 0 must continue from 2"),
        ([5], [-(2**31)], [1], r"^positions of sequence 1 must continue from 0"),
        ([5, 5], [2, 4], [0, 0], r"^positions of sequence 0 must continue from 2"),
        ([5, 5], [2, 2], [0, 0], r"^positions of sequence 0 must continue from 2"),
        ([5, 5], [3, 2], [0, 0], r"^positions of sequence 0 must continue from 2"),
        ([5, 5], [2, 2], [0, 1], r"^positions of sequence 1 must continue from 0"),
        ([5] * 63, range(2, 65), [0] * 63, r"^sequence 0 would reach position 64; n_ctx is 64$"),
        (
            [5] * 193,
            [0] * 193,
            [0] * 193,
            r"^the batch has 193 tokens; n_batch is 192: cut it or use a larger",
        ),
    ],
)
def test_batches_that_do_not_fit(
    either: Context, tokens: list[int], positions: list[int], seq_ids: list[int], message: str
) -> None:
    logits_after(either, [5, 6])
    with pytest.raises(ValueError, match=message):
        either.decode(DecodeBatch(tokens, positions, seq_ids, [1] * len(tokens)))
    assert [either.seq_pos_max(i) for i in range(3)] == [1, -1, -1]
    logits_after(either, [7])


@pytest.mark.parametrize("batch", [None, [1, 2], {"tokens": [1]}, np.array([1])])
def test_only_batches_are_decoded(context: Context, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"^batch must be a DecodeBatch, not "):
        context.decode(batch)


def test_more_outputs_than_the_context_was_made_for(make_context: MakeContext) -> None:
    context = make_context(n_outputs_max=2)
    with pytest.raises(ValueError, match=r"^the batch has 3 outputs; n_outputs_max is 2$"):
        context.decode(DecodeBatch.of_tokens([5, 6, 7], all_outputs=True))
    context.decode(DecodeBatch.of_tokens([5, 6], all_outputs=True))
    assert context.logits(1).shape == (512,)


@pytest.mark.parametrize("bad", [*INTEGERS, Bad(-2, ValueError)], ids=names)
def test_bad_places_in_memory(context: Context, bad: Bad) -> None:
    logits_after(context, [5, 6, 7])
    value = bad.value
    calls: list[tuple[str, Callable[[], object]]] = [
        ("row", lambda: context.logits(value)),
        ("seq_id", lambda: context.seq_pos_max(value)),
        ("seq_id", lambda: context.seq_remove(value)),
        ("p0", lambda: context.seq_remove(0, value)),
        ("p1", lambda: context.seq_remove(0, 0, value)),
        ("src", lambda: context.seq_copy(value, 1)),
        ("dst", lambda: context.seq_copy(0, value)),
        ("p0", lambda: context.seq_copy(0, 1, value)),
        ("p1", lambda: context.seq_copy(0, 1, 0, value)),
    ]
    for name, call in calls:
        with pytest.raises(bad.error, match=f"^{name} (is|must be)"):
            call()
    assert [context.seq_pos_max(i) for i in range(3)] == [2, -1, -1]


@pytest.mark.parametrize("seq_id", [3, 255, 256, 2**31 - 1])
def test_sequences_beyond_the_context(context: Context, seq_id: int) -> None:
    for call in (context.seq_pos_max, context.seq_remove, lambda i: context.seq_copy(0, i)):
        with pytest.raises(ValueError, match=rf"is {seq_id}; it must be from 0 to 2$"):
            call(seq_id)


def test_ranges_in_memory_that_are_empty_or_too_long(either: Context) -> None:
    logits_after(either, [5, 6, 7])
    for p0, p1 in ((3, 3), (5, 3), (1, 0), (2**31 - 1, 2**31 - 1), (100, -1)):
        assert either.seq_remove(0, p0, p1)
        assert either.seq_pos_max(0) == 2
    assert either.seq_remove(1)
    assert either.seq_remove(0, 0, 2**31 - 1)
    assert either.seq_pos_max(0) == -1


def test_a_part_of_a_stream_cannot_be_copied(make_context: MakeContext) -> None:
    """llama.cpp would end the process."""
    context = make_context(n_seq_max=2)
    logits_after(context, [5, 6, 7])
    for p0, p1 in ((1, -1), (0, 2), (0, 0), (2, 1)):
        with pytest.raises(
            ValueError, match=r"cannot be copied alone; copy all and remove the rest, or use kv"
        ):
            context.seq_copy(0, 1, p0, p1)
    context.seq_copy(0, 1)
    assert context.seq_pos_max(1) == 2


def test_a_context_belongs_to_one_thread(context: Context) -> None:
    logits_after(context, [5, 6])
    batch = DecodeBatch.of_tokens([7], 2)
    uses: list[Callable[[], object]] = [
        lambda: context.decode(batch),
        lambda: context.decode(DecodeBatch.of_tokens([7], 99)),
        lambda: context.logits(1),
        lambda: context.seq_remove(0),
        lambda: context.seq_copy(0, 1),
        context.clear,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="belongs to another thread; call release_thread"):
            Worker(use).result()
    context.release_thread()
    Worker(context.decode, batch).result()
    with pytest.raises(RuntimeError, match="belongs to another thread"):
        context.logits(0)


# ---- Context: options
@pytest.mark.parametrize("bad", [*INTEGERS, Bad(-1, ValueError), Bad(0, ValueError)], ids=names)
@pytest.mark.parametrize(
    "name",
    ["n_ctx", "n_seq_max", "n_cells", "n_batch", "n_ubatch", "n_outputs_max", "n_threads", "n_threads_batch"],
)
def test_wrong_sizes_are_refused(make_context: MakeContext, name: str, bad: Bad) -> None:
    optional = ("n_ctx", "n_cells", "n_outputs_max", "n_threads", "n_threads_batch")
    if bad.value is None and name in optional:
        make_context(**{name: None})
        return
    with pytest.raises(bad.error, match=f"^{name} (is|must be)"):
        make_context(**{"kv_unified": True, name: bad.value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: MOST[name] + 1}, rf"^{name} is {MOST[name] + 1}; it must be from 1 to {MOST[name]}$")
            for name in ("n_seq_max", "n_ctx", "n_threads")
        ),
        (
            {"n_ctx": MOST["n_ctx"], "n_seq_max": MOST["n_seq_max"]},
            rf"^n_cells is {MOST['n_ctx'] * MOST['n_seq_max']}; it must be from 1 to {MOST['n_cells']}$",
        ),
        ({"n_seq_max": 8, "n_batch": 7}, r"^n_seq_max is 8 and n_batch 7; n_batch must not be smaller$"),
        (
            {"n_cells": 65},
            r"^n_cells is 65 but n_ctx \* n_seq_max is 64; a different number needs kv_unified",
        ),
        ({"n_outputs_max": 65}, r"^n_outputs_max is 65; it must be from 1 to 64$"),
    ],
)
def test_sizes_that_do_not_go_together(
    make_context: MakeContext, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_context(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 1},
        {"n_batch": 1, "n_ubatch": 1},
        {"n_ubatch": 2**20},
        {"n_batch": 2**20, "n_ubatch": 7},
        {"n_ctx": 257, "n_seq_max": 256},
        {"n_outputs_max": 1, "n_seq_max": 5},
        {"n_cells": 64 * 256, "n_seq_max": 256, "kv_unified": True},
        {"n_cells": 300, "n_ctx": 100, "n_seq_max": 7, "kv_unified": True},
        {"n_ctx": 4096},
    ],
    ids=str,
)
def test_sizes_at_their_limits(make_context: MakeContext, options: dict[str, Any]) -> None:
    context = make_context(**options)
    for seq_id in range(context.n_seq_max):
        logits_after(context, [5], seq_id)
    assert context.n_ubatch <= context.n_batch
    assert context.n_outputs_max >= context.n_seq_max


@pytest.mark.parametrize("bad", CHOICES, ids=names)
@pytest.mark.parametrize("name", ["type_k", "type_v", "flash_attn"])
def test_wrong_choices_are_refused(make_context: MakeContext, name: str, bad: Bad) -> None:
    with pytest.raises(bad.error, match=f"^{name} (is|must be)"):
        make_context(**{name: bad.value})


@pytest.mark.parametrize("flag", FLAGS, ids=names)
def test_kv_unified_is_a_flag(make_context: MakeContext, flag: Bad) -> None:
    with pytest.raises(TypeError, match=r"^kv_unified must be True or False"):
        make_context(kv_unified=flag.value)


@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
@pytest.mark.parametrize("type_k", CACHE_TYPES)
def test_every_pair_of_cache_types_works_or_is_refused(demo: lp.Model, type_k: str, flash_attn: str) -> None:
    """A head of 32 numbers: quantized types fit. Only a quantized V without flash attention is impossible."""
    for type_v in CACHE_TYPES:
        if flash_attn == "off" and type_v not in ("f32", "f16", "bf16"):
            with pytest.raises(BackendError, match="quantized V cache requires flash_attn"):
                Context(demo, n_ctx=64, type_k=type_k, type_v=type_v, flash_attn=flash_attn)
            continue
        with Context(
            demo, n_ctx=64, n_threads=1, type_k=type_k, type_v=type_v, flash_attn=flash_attn
        ) as context:
            assert np.isfinite(logits_after(context, [5, 6, 7])).all()


@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
@pytest.mark.parametrize("type_k", ["q8_0", "q4_0", "iq4_nl"])
def test_cache_types_whose_blocks_do_not_divide_a_head(tmp_path: Path, type_k: str, flash_attn: str) -> None:
    """With flash attention llama.cpp says so; without, it aborts unless we do (one KV head of 16 numbers)."""
    shape = Shape(layers=1, width=64, heads=4, heads_kv=1, ffn=64, context=64)
    with lp.Model(make_model(tmp_path / "narrow.gguf", shape=shape)) as model:
        with pytest.raises((BackendError, ValueError), match=type_k):
            Context(model, type_k=type_k, flash_attn=flash_attn)
        with Context(model, flash_attn=flash_attn, n_threads=1) as context:
            logits_after(context, [5])


@pytest.mark.parametrize("model", [None, "model.gguf", 5])
def test_a_context_needs_a_model(model: Any) -> None:
    with pytest.raises(TypeError, match=r"^model must be a Model, not "):
        Context(model)


# ---- Context: more than the machine has
_LIMITED = """
import ctypes
import resource
import llamapipe as lp
from llamapipe.llama import DecodeBatch, Context

def limit(more_mib):
    "Lets the process have so much more than it has now, or as much as before."
    with open("/proc/self/status") as status:
        has = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmSize"))
    soft = before[0] if more_mib is None else has + more_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))

before = resource.getrlimit(resource.RLIMIT_AS)
# M_ARENA_MAX 1, M_MMAP_THRESHOLD: what the allocator keeps or reserves for threads would pass by the limit.
for option, value in ((-8, 1), (-3, 65536)):
    getattr(ctypes.CDLL(None), "mallopt", lambda *_: 1)(option, value)
"""

needs_limits = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux holds processes to RLIMIT_AS"
)


@needs_limits
def test_memory_that_cannot_be_had_is_an_error(tiny: lp.Model) -> None:
    """In each of the places where llama.cpp asks for much: notes on cells, the cells, the compute buffers."""
    out = run_script(
        _LIMITED
        + """
sizes = [
    {"n_ctx": 2**22},
    {"n_ctx": 2**24},
    {"n_ctx": 2**26},
    {"n_ctx": 2**20, "n_batch": 2**14, "n_ubatch": 2**14},
    {"n_ctx": 2**20, "n_seq_max": 256},
    {"n_ctx": 2**26, "n_seq_max": 31},
    {"n_ctx": 2**20, "n_seq_max": 256, "n_cells": 2**31 - 1, "kv_unified": True},
]
with lp.Model(sys.argv[1]) as model:
    for size in sizes:
        limit(512)
        try:
            Context(model, n_threads=1, **size)
        except lp.errors.BackendError as e:
            say(e)
        limit(None)
        with Context(model, n_ctx=64, n_threads=1) as context:
            context.decode(DecodeBatch.of_tokens([5, 6, 7]))
""",
        tiny.path,
    )
    lines = out.splitlines()
    assert len(lines) == 7, out
    for line in lines:
        assert re.match(
            r"a context of \d+ cells (needs at least|for \d+ sequences could not be created)", line
        )
        assert "a smaller n_ctx, n_seq_max or" in line


@needs_limits
def test_a_step_without_memory_fails_alone() -> None:
    """Rows for 2,048 outputs cannot be had; what the context holds is unharmed."""
    out = run_script(
        _LIMITED
        + """
with lp.Model.demo() as model, Context(model, n_ctx=4096, n_ubatch=64, n_threads=1) as context:
    context.decode(DecodeBatch.of_tokens([5] * 64))
    limit(8)
    for _ in range(2):
        try:
            context.decode(DecodeBatch.of_tokens([5] * 2048, 64, all_outputs=True))
        except lp.errors.DecodeError as e:
            say(e)
    limit(None)
    say(context.seq_pos_max(0))
    context.decode(DecodeBatch.of_tokens([5] * 2048, 64, all_outputs=True))
    say(bool(abs(context.logits(2047)).max() < 1000))
"""
    )
    *failures, position, sane = out.splitlines()
    assert len(failures) == 2
    assert all("could not reserve space for batch with 2048 outputs" in line for line in failures)
    assert (position, sane) == ("63", "True")


@needs_limits
def test_cells_that_can_never_fit_are_refused_before_anything_is_allocated(demo: lp.Model) -> None:
    room = memory_limit()
    assert room is not None
    n_heads = int(demo.metadata["llama.attention.head_count_kv"])
    n_cells = 31 * 2**26
    if room > n_cells * 2 * 2 * n_heads * 32 * demo.n_layer:  # keys and values, in f16
        pytest.skip("this machine has room for every context")
    # Limited, so that this test cannot take the machine's memory when the check is gone.
    out = run_script(
        _LIMITED
        + """
limit(256)
with lp.Model.demo() as model:
    try:
        Context(model, n_ctx=2**26, n_seq_max=31)
    except lp.errors.BackendError as e:
        say(e)
"""
    )
    assert re.match(
        rf"a context of {n_cells} cells needs at least [\d.]+ GiB; this machine gives a process at most "
        rf"{room / 2**30:.1f} GiB: use a smaller n_ctx",
        out,
    )


# ---- lifetime
def test_use_of_a_context_after_close(make_context: MakeContext) -> None:
    context = make_context()
    logits_after(context, [5])
    context.close()
    context.close()
    assert repr(context) == "<Context n_ctx=64 n_seq_max=1 n_cells=64 kv=per-sequence closed>"
    uses: list[Callable[[], object]] = [
        lambda: context.handle,
        lambda: context.decode(DecodeBatch.of_tokens([5])),
        lambda: context.logits(0),
        lambda: context.seq_pos_max(0),
        lambda: context.seq_remove(0),
        lambda: context.seq_copy(0, 0),
        lambda: context.n_reused,
        context.clear,
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match="the context is closed; create another"):
            use()


def test_a_model_with_live_contexts_is_not_closed(tiny: lp.Model) -> None:
    with lp.Model(tiny.path) as model:
        first, second = Context(model, n_ctx=64), Context(model, n_ctx=64)
        with pytest.raises(EngineClosedError, match=r"^the model is in use; first close Context, Context$"):
            model.close()
        assert not model.closed
        first.close()
        with pytest.raises(EngineClosedError, match=r"^the model is in use; first close Context$"):
            model.close()
        second.close()


def test_what_could_not_be_made_does_not_keep_a_model_open(tiny: lp.Model) -> None:
    with lp.Model(tiny.path) as model:
        failures: list[dict[str, Any]] = [{"n_ctx": 0}, {"type_k": "q8_0"}, {"n_batch": 1, "n_seq_max": 2}]
        for options in failures:
            with pytest.raises((ValueError, BackendError)):
                Context(model, **options)


def test_dropped_without_close_they_warn(tiny: lp.Model) -> None:
    model = lp.Model(tiny.path)
    handle = model.handle
    with pytest.warns(ResourceWarning, match=r"<Model 'tiny.gguf' .*> was never closed; use `with` or close"):
        del model
    context = Context(tiny, n_ctx=64)
    context_handle = context.handle
    with pytest.warns(ResourceWarning, match=r"<Context n_ctx=64 .*> was never closed; use `with` or close"):
        del context
    # What was dropped is not freed behind the user's back; this test has to.
    forget_children(tiny)
    native().lib.lp_context_free(context_handle)
    native().lib.llama_model_free(handle)


def test_a_model_that_is_not_causal_sees_the_whole_text(tmp_path: Path) -> None:
    """llama.cpp aborts when such a batch is cut into chunks."""
    with lp.Model(not_causal_model(tmp_path / "m.gguf")) as model:
        assert not model.is_causal
        with Context(model, n_ctx=256, n_batch=64, n_ubatch=16) as context:
            assert context.n_ubatch == 64
            context.decode(DecodeBatch.of_tokens(list(range(3, 67)), all_outputs=True))
            seen = context.logits(0)
            context.clear()
            context.decode(DecodeBatch.of_tokens([*range(3, 66), 9], all_outputs=True))
            assert not np.array_equal(seen, context.logits(0))
        with pytest.raises(ValueError, match=r"m\.gguf is not causal"):
            lp.Engine(model)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="tells what threads do on Linux only")
def test_compute_threads_that_rest(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """They spin for a while behind each graph, here for half a second; not at rest, and they work again when asked."""
    monkeypatch.setattr(context_module, "_POLL", 100)
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    context = make_context(n_threads=2)
    workers = {path.name for path in Path("/proc/self/task").iterdir()} - before
    if not workers:
        pytest.skip("OpenMP's threads are its own business")

    def logits() -> Any:
        context.clear()
        context.decode(DecodeBatch([1, 2, 3], [0, 1, 2], [0] * 3, [0, 0, 1]))
        return context.logits(2)

    expected = logits()
    for _ in range(3):
        worked = sum(map(cpu_ns, workers))
        native().lib.lp_context_rest(context.handle)
        wait_until(lambda: all(map(asleep, workers)))
        assert sum(map(cpu_ns, workers)) - worked < 100_000_000
        assert np.array_equal(logits(), expected)
    context.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="tells what threads do on Linux only")
def test_threads_that_are_left_out_sleep(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for a graph spins, here for half a second; one that no graph needs must not."""
    monkeypatch.setattr(context_module, "_POLL", 100)
    tasks = Path("/proc/self/task")
    before = {path.name for path in tasks.iterdir()}
    context = make_context(n_threads=2)
    workers = {path.name for path in tasks.iterdir()} - before
    if not workers:
        pytest.skip("OpenMP's threads are its own business")

    def logits() -> Any:
        context.clear()
        context.decode(DecodeBatch([1, 2, 3], [0, 1, 2], [0] * 3, [0, 0, 1]))
        return context.logits(2)

    def works_on(worked: int) -> bool:
        return sum(map(cpu_ns, workers)) > worked

    expected = logits()
    for n in (1, 2, 1, 2):
        context.set_threads(n)
        assert context.n_threads == context.n_threads_batch == n
        worked = sum(map(cpu_ns, workers))
        assert np.array_equal(logits(), expected)
        if n == 2:
            wait_until(partial(works_on, worked))  # the kernel counts at its next tick
            continue
        wait_until(lambda: all(map(asleep, workers)))
        for _ in range(5):
            assert np.array_equal(logits(), expected)
        assert all(map(asleep, workers))
        assert sum(map(cpu_ns, workers)) - worked < 100_000_000
    assert {path.name for path in tasks.iterdir()} - before == workers  # none were started again
    context.set_threads(1, 3)
    assert (context.n_threads, context.n_threads_batch) == (1, 3)
    assert len({path.name for path in tasks.iterdir()} - before) == 3
    assert np.array_equal(logits(), expected)
    wait_until(lambda: all(map(asleep, workers)))
    context.close()
    wait_until(lambda: {path.name for path in tasks.iterdir()} <= before)  # others may have ended


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have ids on Linux only")
def test_the_threads_that_compute_are_known(make_context: MakeContext) -> None:
    context = make_context(n_threads=3)
    assert context.compute_thread_ids() == []
    for n in (3, 1, 2):
        context.set_threads(n)
        context.decode(DecodeBatch([1], [context.seq_pos_max(0) + 1], [0], [1]))
        caller, *workers = context.compute_thread_ids()
        assert caller == threading.get_native_id()
        if n > 1 and not workers:
            pytest.skip("OpenMP's threads are its own business")
        assert len({caller, *workers}) == n
        for worker in workers:
            assert Path(f"/proc/self/task/{worker}/comm").read_text().startswith("lp-compute-")


@pytest.mark.parametrize(("n_threads", "n_threads_batch"), [(0, 1), (1, 0), (513, 1), (1, 513)])
def test_numbers_of_threads_that_cannot_be(context: Context, n_threads: int, n_threads_batch: int) -> None:
    with pytest.raises(ValueError, match="n_threads"):
        context.set_threads(n_threads, n_threads_batch)
    assert context.n_threads == 1


def test_keys_of_4_bits_warn_once(
    demo: lp.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llamapipe.llama.context._warned", set())
    for _ in range(2):
        Context(demo, n_ctx=64, type_k="q4_0", type_v="q4_0").close()
        Context(demo, n_ctx=64, type_k="q8_0", type_v="q4_0").close()
    assert [record.getMessage()[:17] for record in caplog.records if "4 bits" in record.message] == [
        "type_k is 'q4_0':"
    ]
