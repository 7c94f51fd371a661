"""Real weights at work: JSON, tools, sequences that fork, are saved and preempted, windows, and memory over time."""

from __future__ import annotations

import datetime
import json
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import jsonschema
import pytest
from support.random_schemas import SchemaMaker
from support.real_weights import needs_all, real_model

import llamapipe as lp
from llamapipe.native.load import native

HERE = Path(__file__).resolve().parents[2]


def words() -> str:
    return (HERE / "design" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2", "qwen-0.5b"])
def test_json_satisfies_its_schema(name: str) -> None:
    schemas = [SchemaMaker(seed).schema() for seed in range(30)]
    with lp.Model(real_model(name)) as model, lp.Engine(model, n_ctx=1024, n_seq_max=8) as engine:
        answers = engine.generate(
            [f"Write JSON that satisfies {json.dumps(schema)[:300]}:\n" for schema in schemas],
            [
                lp.SamplingParams(max_tokens=400, temperature=1.3, seed=i, json_schema=schema)
                for i, schema in enumerate(schemas)
            ],
        )
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish_reason == "stop", answer.text
        jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2", "qwen-0.5b"])
def test_sequences_that_fork_are_saved_and_preempted_say_what_they_say_alone(name: str) -> None:
    """16 callers share five slots; every fourth text is cancelled halfway."""
    if not native().lib.lp_kernels_attend():
        pytest.skip("without kernels of its own this processor computes rows that depend on each other")
    n_tokens = 24

    def told(engine: lp.Engine, i: int) -> list[int]:
        prompt = tokens[: 30 + 7 * (i % 5)] + tokens[i : i + 20]
        params = lp.SamplingParams(max_tokens=n_tokens, temperature=0.9, seed=i, ignore_eos=True)
        with engine.start(prompt, params) as generation:
            for _ in range(n_tokens // 2):
                generation.next()
            if i % 4 == 1:
                generation.cancel()
                return []
            if i % 4 == 2:
                with generation.fork(seed=100 + i) as fork:
                    said = [token.id for token in fork]
                return [*said, *(token.id for token in generation)]
            if i % 4 == 3:
                with engine.restore(generation.snapshot(), params) as restored:
                    return [token.id for token in restored][: n_tokens // 2]
            return [token.id for token in generation]

    with lp.Model(real_model(name)) as model:
        tokens = model.tokenize(words())[:200]
        with lp.Engine(model, n_ctx=256, n_seq_max=1, n_threads=1, batch_invariant=True) as engine:
            alone = [told(engine, i) for i in range(16)]
        with lp.Engine(model, n_ctx=256, n_seq_max=5, batch_invariant=True) as engine:
            for _ in range(2):
                with ThreadPoolExecutor(16) as pool:
                    assert list(pool.map(lambda i: told(engine, i), range(16))) == alone


@pytest.mark.timeout(1800)
def test_prefixes_and_snapshots_across_the_window() -> None:
    """Gemma's window is 512 tokens long: prompts, cached prefixes and snapshots are longer."""
    with lp.Model(real_model("gemma3")) as model:
        tokens = model.tokenize(words())
        params = lp.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        prompts = [tokens[:n] for n in (500, 700, 701, 900)]
        with lp.Engine(model, n_ctx=1024, n_seq_max=1, prefix_cache=False, batch_invariant=True) as engine:
            alone = [list(engine.generate(prompt, params).token_ids) for prompt in prompts]
            turns = [[*prompt, *said, *tokens[:9]] for prompt, said in zip(prompts, alone, strict=True)]
            answers = [list(engine.generate(turn, params).token_ids) for turn in turns]
        with lp.Engine(model, n_ctx=1024, n_seq_max=4, batch_invariant=True) as engine:
            assert [list(done.token_ids) for done in engine.generate(prompts, params)] == alone
            second = engine.generate(turns, params)
            assert [list(done.token_ids) for done in second] == answers
            assert [done.n_cached_tokens for done in second] == [len(turn) - 10 for turn in turns]
            with engine.start(prompts[1], params) as generation:
                first = [token.id for token in islice(generation, 12)]
                snapshot = generation.snapshot()
            with engine.restore(snapshot, params) as restored:
                assert [*first, *(token.id for token in islice(restored, 12))] == alone[1]


def calculate(expression: str) -> float:
    """Calculates a product or a sum, such as 12 * 7.

    Args:
        expression: two numbers with + or * between them
    """
    left, operator, right = expression.replace("+", " + ").replace("*", " * ").split()
    return float(left) * float(right) if operator == "*" else float(left) + float(right)


def find_files(name: str) -> list[str]:
    """Finds files by a part of their name.

    Args:
        name: a part of the name
    """
    return [path.name for path in sorted((HERE / "docs").glob("*.md")) if name.lower() in path.name]


def current_year() -> int:
    """Returns the current year."""
    return datetime.date(2026, 11, 26).year


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("question", "tool", "answer"),
    [
        ("What is 1234 * 567? Use the calculator.", "calculate", "699"),
        ("Which files have 'sampling' in their names?", "find_files", "sampling.md"),
        ("Which year is it now? Ask the clock.", "current_year", "2026"),
    ],
)
def test_the_loop_of_tools(question: str, tool: str, answer: str) -> None:
    tools = {function.__name__: function for function in (calculate, find_files, current_year)}
    messages: list[dict[str, object]] = [{"role": "user", "content": question}]
    params = lp.SamplingParams(max_tokens=200, temperature=0)
    with lp.Model(real_model("qwen-1.5b")) as model, lp.Engine(model, n_ctx=2048, n_seq_max=2) as engine:
        said = engine.chat(messages, params, tools=list(tools.values()))
        messages.append(said.message)
        (call,) = said.tool_calls
        assert call.name == tool
        result = json.dumps(tools[call.name](**call.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        # A model of this size asks again or thanks for the result, unless it is asked to tell it.
        messages.append({"role": "user", "content": "Tell me the answer to my question in one sentence."})
        assert answer in engine.chat(messages, params).content.replace(",", "")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["qwen-0.5b", "qwen-1.5b"])
def test_a_tool_without_parameters_is_called_without_arguments(name: str) -> None:
    """The smaller one writes calls as plain JSON, which no grammar limits, and repeats the schema in them."""
    function = {
        "name": "get_time",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {}},
    }
    with lp.Model(real_model(name)) as model, lp.Engine(model, n_ctx=1024, n_seq_max=4) as engine:
        asked = [
            "What time is it?",
            "Which time do we have? Use a tool.",
            "Call get_time.",
            "Is it late already?",
        ]
        said = engine.chat(
            [[{"role": "user", "content": question}] for question in asked],
            lp.SamplingParams(max_tokens=100, temperature=0),
            tools=[{"type": "function", "function": function}],
        )
        calls = [call for answer in said for call in answer.tool_calls]
        assert len(calls) >= 2
        assert all((call.name, call.arguments) == ("get_time", {}) for call in calls)


@pytest.mark.timeout(3600)
@needs_all
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_20000_requests_leave_memory_flat() -> None:
    with lp.Model(real_model("smollm2")) as model, lp.Engine(model, n_ctx=128, n_seq_max=16) as engine:
        tokens = model.tokenize(words())
        params = lp.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        sizes = []
        for i in range(20):
            prompts = [[*tokens[(i * 1000 + k) % 2000 :][:3], k] for k in range(1000)]
            assert len(engine.generate(prompts, params)) == 1000
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(resident * resource.getpagesize() / 2**20)
    assert max(sizes[10:]) - max(sizes[:10]) < 8, sizes
