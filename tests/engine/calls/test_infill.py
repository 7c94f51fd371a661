"""Filling in the middle: the calls for threads and tasks, what they cut, and what an editor's keys compute."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.gguf_models import infilling_model

import llamapipe as lp
from llamapipe.llama.fim import fim_room

PARAMS = lp.SamplingParams(max_tokens=12, temperature=0)
LINES = "".join(f"    if fox[{i}] == {i * 7}: return box({i})\n" for i in range(400))
N_CTX = 1024


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    path = infilling_model(tmp_path_factory.mktemp("fim") / "fim.gguf", with_files=True)
    with lp.Engine(path, n_ctx=N_CTX, n_seq_max=2) as engine:
        yield engine
        engine.check_integrity()


@pytest.mark.parametrize("order", ["psm", "spm"])
def test_each_call_completes_the_models_prompt(engine: lp.Engine, order: Any) -> None:
    extra: list[Any] = [("fox.py", "A fox ran."), {"text": "A box."}]
    prompt = engine.model.tokenize_fim("Once", "end", extra=extra, filename="end.py", order=order)
    expected = engine.generate(prompt, PARAMS)
    options: dict[str, Any] = {"extra": extra, "filename": "end.py", "order": order}
    completion = engine.infill("Once", "end", PARAMS, **options)
    assert (completion.text, completion.n_prompt_tokens) == (expected.text, len(prompt))
    with engine.stream_infill("Once", "end", PARAMS, **options) as stream:
        assert "".join(delta.text for delta in stream) == expected.text

    async def tasks() -> None:
        assert (await engine.ainfill("Once", "end", PARAMS, **options)).text == expected.text
        async with engine.astream_infill("Once", "end", PARAMS, **options) as stream:
            assert "".join([delta.text async for delta in stream]) == expected.text

    asyncio.run(tasks())


@pytest.mark.parametrize("n_new", [1, 100, 5000, None])
def test_a_long_file_is_cut_to_leave_room(engine: lp.Engine, n_new: int | None) -> None:
    params = lp.SamplingParams(max_tokens=n_new, stop=[" "])
    completion = engine.infill(LINES * 20, LINES, params)
    assert fim_room(N_CTX, n_new) * 0.8 < completion.n_prompt_tokens <= fim_room(N_CTX, n_new)
    assert (
        asyncio.run(engine.ainfill(LINES * 20, LINES, params)).n_prompt_tokens == completion.n_prompt_tokens
    )


def test_wrong_calls_raise(engine: lp.Engine, demo: lp.Model) -> None:
    for call in (engine.infill, engine.stream_infill, engine.astream_infill):
        for wrong, error in (
            ((1, "b"), TypeError),
            (("a", None), TypeError),
            (("a", "b", 3), TypeError),
            (("a", "b", [PARAMS]), TypeError),
            (("\ud800", "b"), ValueError),
        ):
            with pytest.raises(error):
                call(*wrong)
        with pytest.raises(TypeError, match=r"SamplingParams\(max_tokens=3\)"):
            call("a", "b", max_tokens=3)  # type: ignore[call-arg]
    refused = pytest.raises(lp.errors.InvalidRequestError, match="no tokens for filling in")
    with lp.Engine(demo, n_ctx=64, n_seq_max=1) as plain, refused:
        plain.infill("a", "b")
    with pytest.raises(lp.errors.EngineClosedError):
        plain.infill("a", "b")


@pytest.mark.parametrize("order", ["psm", "spm"])
@pytest.mark.parametrize("n_before", [2000, len(LINES)])  # characters: with room to spare, and cut
def test_a_key_computes_what_it_changes(engine: lp.Engine, order: Any, n_before: int) -> None:
    before, typed, after = LINES[:n_before], "return fox(box) + 1 # and on", LINES[-700:]
    params = lp.SamplingParams(max_tokens=1, temperature=0)
    engine.infill(before, after, params, order=order)
    n_suffix = len(engine.model.tokenize_fim("", after))
    n_computed = []
    for i in range(1, len(typed) + 1):
        completion = engine.infill(before + typed[:i], after, params, order=order)
        n_computed.append(completion.n_prompt_tokens - completion.n_cached_tokens)
    most = 15 if order == "spm" else 15 + n_suffix
    n_over = sum(n > most for n in n_computed)
    assert n_over <= 1, n_computed  # at most one step is left out meanwhile
