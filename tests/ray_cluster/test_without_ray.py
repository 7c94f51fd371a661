"""What needs no Ray: specifications, rows and answers, the costs by which requests are routed."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from support.adapters import make_adapter
from support.run_script import environment

import llamapipe as lp
from llamapipe.host.cores import usable_cores
from llamapipe.host.cpu_load import limit_cores, process_budget
from llamapipe.ray import Completer, EngineSpec
from llamapipe.ray._costs import (
    CHUNK_BYTES,
    AdapterNames,
    HttpRequest,
    PrefixCosts,
    chunks_of,
    prompt_and_owner,
)
from llamapipe.ray._data import RowFormat
from llamapipe.ray._spec import activated_loras, cores_of_actor

GREEDY = lp.SamplingParams(max_tokens=6, temperature=0.0)
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


class TestSpec:
    def test_it_can_be_pickled_and_compared(self) -> None:
        spec = EngineSpec(Path("model.gguf"), {"n_ctx": 256, "n_seq_max": 3}, {"n_gpu_layers": 2})
        again = pickle.loads(pickle.dumps(spec))
        assert again == spec and hash(again) == hash(spec)
        assert (again.model, again.n_seq_max) == ("model.gguf", 3)
        assert EngineSpec("model.gguf").n_seq_max == 8
        with pytest.raises(FrozenInstanceError):
            spec.model = "other.gguf"  # type: ignore[misc]

    def test_options_are_copied(self) -> None:
        options = {"n_ctx": 256}
        spec = EngineSpec("model.gguf", options)
        options["n_ctx"] = 1
        assert spec.engine_options == {"n_ctx": 256}

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((7,), TypeError, "model must be a path"),
            (("hf:owner",), ValueError, "hf:OWNER/REPO"),
            (("m.gguf", {"n_ctxx": 1}), ValueError, "did you mean n_ctx"),
            (("m.gguf", {"model": "x"}), ValueError, "not an option of Engine"),
            (("m.gguf", {}, {"progress": print}), ValueError, "not an option of Model"),
            (("m.gguf", 5), TypeError, "engine_options must be a mapping"),
            (("m.gguf", {}, {}, ["a.gguf"]), TypeError, "adapters must be a mapping from names to files"),
            (("m.gguf", {}, {}, {"a": 5}), TypeError, "the file of 'a' must be a path"),
            (("m.gguf", {}, {}, {"": "a.gguf"}), ValueError, "has 0 characters"),
            (("m.gguf", {}, {}, {"a": "hf:owner"}), ValueError, "hf:OWNER/REPO"),
            (("m.gguf", {}, {}, {"a": "a"}, {"a": "b"}), ValueError, "'a' is the name of an adapter and of"),
        ],
    )
    def test_wrong_ones_are_refused(self, arguments: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            EngineSpec(*arguments)

    def test_an_engine_is_opened_and_closed(self, tiny: lp.Model) -> None:
        spec = EngineSpec(
            tiny.path, {"n_ctx": 128, "n_threads": 1, "n_seq_max": 2}, {"chat_template": TEMPLATE}
        )
        with spec.open() as engine:
            assert (engine.n_ctx, engine.n_seq_max, engine.model.chat_template) == (128, 2, TEMPLATE)
        assert engine.closed

    def test_adapters_are_loaded(self, demo: lp.Model) -> None:
        letters = demo.path.with_name("letters.gguf")
        spec = EngineSpec(demo.path, {"n_ctx": 128, "adapters": ["letters"]}, adapters={"letters": letters})
        spec = pickle.loads(pickle.dumps(spec))
        with spec.open() as engine:
            assert [adapter.name for adapter in engine.adapters] == ["letters"]
            texts = {
                engine.generate("Dear Mia,", replace(GREEDY, adapter=adapter)).text
                for adapter in (None, "letters")
            }
        assert len(texts) == 2

    def test_activated_loras_are_known_by_their_files(self, tiny: lp.Model, tmp_path: Path) -> None:
        for name, invocation in (("always", None), ("invoked", [200])):
            make_adapter(tmp_path / name, tiny.path, invocation=invocation)
        (tmp_path / "damaged").write_bytes(b"GGUF")
        files = {name: tmp_path / name for name in ("always", "invoked", "damaged", "missing")}
        assert activated_loras(EngineSpec(tiny.path, adapters=files)) == ["invoked"]

    def test_a_process_computes_on_a_part_of_the_cores(self) -> None:
        before = process_budget().n_cores
        try:
            limit_cores(1)
            assert process_budget().member().n_allowed == 1
            limit_cores(10_000)
            assert process_budget().n_cores == usable_cores()
        finally:
            process_budget().resize(before)
        assert cores_of_actor(None, 1) is None
        assert cores_of_actor(1.5, 7) == 2
        assert cores_of_actor(None, usable_cores()) == 1
        assert cores_of_actor(0, 10_000) == 1


def completed(completer: Completer, table: arrow.Table) -> arrow.Table:
    async def run() -> list[arrow.Table]:
        return [part async for part in completer(table)]

    (part,) = asyncio.run(run())
    return part


@pytest.fixture
def completer(demo: lp.Model, request: pytest.FixtureRequest) -> Any:
    completers: list[Completer] = []

    def make(**arguments: Any) -> Completer:
        spec = EngineSpec(demo.path, {"n_ctx": 256, "n_seq_max": 4}, {"chat_template": TEMPLATE})
        completers.append(Completer(spec, **arguments))
        return completers[-1]

    yield make
    for completer in completers:
        completer.close()
        completer.close()
        assert completer.engine.closed


class TestRows:
    def test_columns_are_added_and_a_bad_row_fails_alone(self, completer: Any, demo: lp.Model) -> None:
        table = arrow.table({"id": [1, 2, 3], "q": ["The cat", None, "A dog"], "w": [0.5, 0.25, 1.0]})
        out = completed(completer(prompt="q", params=GREEDY), table)
        assert out.select(["id", "q", "w"]).equals(table)
        with lp.Engine(demo, n_ctx=256, n_seq_max=4) as engine:
            expected = [completion.text for completion in engine.generate(["The cat", "A dog"], GREEDY)]
        assert out["text"].to_pylist() == [expected[0], None, expected[1]]
        assert out["error"].to_pylist() == [None, "ValueError: the column 'q' is null", None]
        assert out["n_completion_tokens"].to_pylist() == [6, None, 6]

    def test_all_batches_of_a_job_have_the_same_types(self, completer: Any) -> None:
        talker = completer(prompt="q", params=GREEDY)
        good = completed(talker, arrow.table({"q": ["The cat"]}))
        bad = completed(talker, arrow.table({"q": arrow.array([None], arrow.string())}))
        assert good.schema == bad.schema

    def test_options_of_rows(self, completer: Any) -> None:
        options = [
            {"max_tokens": 2, "n": None},
            None,
            {"max_tokens": 3, "n": 2},
            {"max_tokens": -1, "n": None},
        ]
        table = arrow.table({"q": ["The cat"] * 4, "o": options})
        out = completed(completer(prompt="q", options="o", params=GREEDY), table).to_pylist()
        assert [row["n_completion_tokens"] for row in out] == [2, 6, 6, None]
        assert out[2]["texts"] == [out[2]["text"]] * 2
        assert out[0]["texts"] is None
        assert "max_tokens is -1" in out[3]["error"]
        texts = ['{"max_tokens": 2, "logprobs": 0}', "[]", '{"max_tokenz": 1}', "{", '{"prompt": "x"}']
        out = completed(
            completer(prompt="q", options="o"), arrow.table({"q": ["The cat"] * 5, "o": texts})
        ).to_pylist()
        assert len(json.loads(out[0]["logprobs"])) == 2
        assert "options must be an object" in out[1]["error"]
        assert "did you mean max_tokens" in out[2]["error"]
        assert out[3]["error"].startswith("ValueError")
        assert "'prompt' is not an option" in out[4]["error"]

    def test_conversations_are_lists_or_json(self, completer: Any) -> None:
        spoken = [[{"role": "user", "content": "The cat"}], None]
        out = completed(completer(messages="m", params=GREEDY), arrow.table({"m": spoken})).to_pylist()
        text = completed(
            completer(messages="m", params=GREEDY), arrow.table({"m": [json.dumps(spoken[0])]})
        ).to_pylist()[0]["text"]
        assert out[0]["text"] == text != ""
        assert out[0]["error"] is None and "'m' is null" in out[1]["error"]

    def test_templates_and_token_ids(self, completer: Any) -> None:
        table = arrow.table({"a": ["The"], "b": ["cat"], "ids": [[1, 5, 7]]})
        out = completed(completer(prompt="{a} {b}", params=GREEDY, prefix="made_"), table).to_pylist()[0]
        plain = completed(completer(prompt="q", params=GREEDY), arrow.table({"q": ["The cat"]})).to_pylist()[
            0
        ]
        assert out["made_text"] == plain["text"]
        out = completed(completer(prompt="ids", params=GREEDY), table).to_pylist()[0]
        assert (out["n_prompt_tokens"], out["error"]) == (3, None)

    def test_an_empty_batch_stays_empty(self, completer: Any) -> None:
        assert completed(completer(prompt="q"), arrow.table({"x": []})).num_rows == 0

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({}, ValueError, "either prompt"),
            ({"prompt": "q", "messages": "m"}, ValueError, "either prompt"),
            ({"prompt": 3}, TypeError, "prompt must be a str"),
            ({"prompt": "{{}}"}, ValueError, "names no column"),
            ({"prompt": "{a.b}"}, ValueError, "name of a column"),
            ({"prompt": "q", "params": {"n": 1}}, TypeError, "SamplingParams"),
            ({"prompt": "q", "params": lp.SamplingParams(prompt_logprobs=1)}, ValueError, "prompt_logprobs"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            RowFormat(**arguments)

    def test_missing_columns_and_those_in_the_way(self) -> None:
        with pytest.raises(ValueError, match=r"no column 'q'; the rows have 'id', 'text'"):
            RowFormat("q").check_columns(["id", "text"])
        with pytest.raises(ValueError, match="prefix="):
            RowFormat("id").check_columns(["id", "text"])
        RowFormat("id", prefix="answer_").check_columns(["id", "text"])
        with pytest.raises(ValueError, match="no column 'b'"):
            RowFormat("{a} {b}").check_columns(["a"])


def cost_of(costs: PrefixCosts[str], replica: str, prompt: bytes) -> int:
    return costs.cost(replica, len(prompt), chunks_of(prompt))


class TestCosts:
    def test_equal_prefixes_have_equal_chunks(self) -> None:
        a, b = chunks_of(b"x" * 1000 + b"a" * 1000), chunks_of(b"x" * 1000 + b"b" * 1000)
        n = 1000 // CHUNK_BYTES
        assert a[:n] == b[:n]
        assert not set(a[n:]) & set(b[n:])
        assert len(a) == 2000 // CHUNK_BYTES
        assert chunks_of(b"x" * (CHUNK_BYTES - 1)) == []
        end = b"z" * CHUNK_BYTES
        assert chunks_of(b"a" * CHUNK_BYTES + end)[1] != chunks_of(b"b" * CHUNK_BYTES + end)[1]

    def test_a_request_goes_to_the_replica_with_its_prefix_until_that_is_busy(self) -> None:
        costs = PrefixCosts[str](request_bytes=1000)
        prompt = b"p" * 6400
        costs.route("0", "a", len(prompt), chunks_of(prompt))
        costs.finish("0")
        placed = []
        for i in range(20):
            (best, _) = costs.rank(["b", "a"], len(prompt), chunks_of(prompt), {})
            costs.route(str(i + 1), best, len(prompt), chunks_of(prompt))
            placed.append(best)
        # Seven requests on a cost more than computing the prefix on b; then both have it, and they take turns.
        assert placed[:8] == ["a"] * 7 + ["b"]
        assert abs(placed.count("a") - placed.count("b")) <= 7
        assert set(placed[-2:]) == {"a", "b"}

    def test_unlike_prompts_are_spread(self) -> None:
        costs = PrefixCosts[str]()
        placed = []
        for i in range(12):
            prompt = str(i).encode() * 500
            best = costs.rank(["a", "b", "c"], len(prompt), chunks_of(prompt), {})[0]
            costs.route(str(i), best, len(prompt), chunks_of(prompt))
            placed.append(best)
        assert [placed.count(name) for name in "abc"] == [4, 4, 4]

    def test_what_other_routers_sent_counts(self) -> None:
        costs = PrefixCosts[str](request_bytes=10)
        assert costs.rank(["a", "b"], 0, [], {"a": 3, "b": 2}) == ["b", "a"]
        for i in range(3):
            costs.route(str(i), "b", 0, [])
        assert costs.cost("b", 0, [], n_queued=3) == 30
        assert costs.cost("b", 0, [], n_queued=5) == 50

    def test_a_request_counts_once_wherever_it_ends_up(self) -> None:
        costs = PrefixCosts[str]()
        costs.route("x", "a", 100, [])
        costs.record_accepted("x", "b")
        assert cost_of(costs, "a", b"") == 0 < cost_of(costs, "b", b"")
        costs.finish("x", "a")  # the refusal of a replica that comes late
        assert cost_of(costs, "b", b"") > 0
        costs.finish("x", "b")
        costs.finish("x", "b")
        assert cost_of(costs, "b", b"") == 0
        costs.record_accepted("x", "b")  # it had ended before
        assert cost_of(costs, "b", b"") == 0

    def test_memory_is_bounded_and_begins_are_kept(self) -> None:
        costs = PrefixCosts[str](n_remembered_bytes=10 * CHUNK_BYTES)
        shared = b"s" * 4 * CHUNK_BYTES
        for i in range(50):
            prompt = shared + str(i).encode() * 3 * CHUNK_BYTES
            costs.route(str(i), "a", len(prompt), chunks_of(prompt))
            costs.finish(str(i))
        assert costs.n_matched("a", chunks_of(shared)) == 4
        assert costs.n_matched("a", chunks_of(shared + b"0" * 3 * CHUNK_BYTES)) == 4

    def test_the_end_of_a_prompt_is_forgotten_first(self) -> None:
        costs = PrefixCosts[str](n_remembered_bytes=10 * CHUNK_BYTES)
        first, second = b"f" * 8 * CHUNK_BYTES, b"s" * 5 * CHUNK_BYTES
        costs.route("0", "a", len(first), chunks_of(first))
        costs.route("1", "a", len(second), chunks_of(second))
        assert costs.n_matched("a", chunks_of(first)) == 5
        assert costs.n_matched("a", chunks_of(second)) == 5

    def test_replicas_that_are_gone_are_forgotten(self) -> None:
        costs = PrefixCosts[str]()
        costs.route("x", "a", 6400, chunks_of(b"p" * 6400))
        costs.keep(["b"])
        assert cost_of(costs, "a", b"p" * 6400) == 6400
        costs.finish("x")
        assert "n_running=0" in repr(costs)

    @pytest.mark.parametrize("seed", range(20))
    def test_when_all_is_done_no_load_is_left(self, seed: int) -> None:
        rng, costs, running = random.Random(seed), PrefixCosts[str](), list[str]()
        for i in range(200):
            prompt = bytes(rng.choices(b"ab", k=1)) * rng.randrange(3000)
            name = rng.choice(costs.rank("abc", len(prompt), chunks_of(prompt), {}))
            costs.route(str(i), name, len(prompt), chunks_of(prompt))
            running.append(str(i))
            if rng.random() < 0.4:
                costs.record_accepted(rng.choice(running), rng.choice("abc"))
            while running and rng.random() < 0.5:
                costs.finish(running.pop(rng.randrange(len(running))))
        for name in running:
            costs.finish(name)
        assert [cost_of(costs, name, b"") for name in "abc"] == [0, 0, 0]


class TestRequests:
    def body(self, **fields: Any) -> bytes:
        return prompt_and_owner([http_request(**fields)], {})[0]

    def test_prompts_of_bodies_begin_alike_whatever_the_options(self) -> None:
        system = {"role": "system", "content": "s" * 500}
        a = self.body(model="m", stream=True, messages=[system, {"role": "user", "content": "one"}])
        b = self.body(messages=[system, {"role": "user", "content": "two"}], max_tokens=3)
        assert a != b
        assert a[:500] == b[:500]
        assert self.body(prompt="Hello") == b"Hello"
        assert self.body(system="You are", messages=[]) == b"You are"

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": 5}'])
    def test_bodies_without_a_prompt_are_no_error(self, body: bytes) -> None:
        prompt_and_owner([HttpRequest("POST", "/", "", b"", (), body)], {})

    def test_arguments_of_handles(self) -> None:
        def prompt(*arguments: object) -> bytes:
            return prompt_and_owner(arguments, {})[0]

        assert prompt("Hello", lp.SamplingParams()) == b"Hello"
        assert prompt([1, 2]) == b"\1\0\0\0\2\0\0\0"
        assert prompt([1, 2, 3]).startswith(prompt([1, 2]))
        assert prompt() == b""
        assert prompt([{"role": "user", "content": "x"}]) == b'[{"role": "user", "content": "x"}]'
        assert prompt(object()) == b""


def http_request(**fields: Any) -> HttpRequest:
    request = HttpRequest("POST", "/v1/completions", "", b"", (), json.dumps(fields).encode())
    return pickle.loads(pickle.dumps(request))  # type: ignore[no-any-return]


ADAPTERS = AdapterNames(["sql", "law", "check", "calm"], {"check"})
PROMPT = "p" * 6400


def with_body(**fields: Any) -> bytes:
    """The owner of a prompt over HTTP."""
    return prompt_and_owner([http_request(prompt=PROMPT, **fields)], {}, ADAPTERS)[1]


def with_params(**fields: Any) -> bytes:
    """The owner of a prompt of a handle."""
    params = lp.SamplingParams(**fields)
    (_, owner), (_, named) = (
        prompt_and_owner([PROMPT, params], {}, ADAPTERS),
        prompt_and_owner([PROMPT], {"params": params}, ADAPTERS),
    )
    assert owner == named
    return owner


class TestOwners:
    """Cells belong to the adapters that computed them, so a prefix is found only with the same ones."""

    def test_a_request_goes_where_its_prefix_is_with_its_adapters(self) -> None:
        costs = PrefixCosts[str]()
        choices = {"a": None, "b": "sql", "c": "law", "d": {"sql": 0.5}}
        for replica, choice in choices.items():
            costs.route(
                replica, replica, len(PROMPT), chunks_of(PROMPT.encode(), with_params(adapter=choice))
            )
            costs.finish(replica)
        for replica, choice in choices.items():
            chunks = chunks_of(PROMPT.encode(), with_params(adapter=choice))
            assert costs.rank("dcba", len(PROMPT), chunks, {})[0] == replica
            matched = {name: costs.n_matched(name, chunks) for name in choices}
            assert matched == {name: len(chunks) if name == replica else 0 for name in choices}

    def test_names_numbers_and_mappings_mean_the_same(self) -> None:
        sql = with_params(adapter="sql")
        assert sql == with_params(adapter={"sql": 1}) == with_params(adapter={"law": 0, "sql": 1.0})
        assert sql == with_body(model="sql") == with_body(model="sql:latest") == with_body(lora=[{"id": 0}])
        both = with_params(adapter={"sql": 0.5, "law": 2})
        assert both == with_params(adapter={"law": 2, "sql": 0.5})
        assert both == with_body(lora=[{"id": 1, "scale": 2}, {"id": 0, "scale": 0.5}])
        assert len({b"", sql, both, with_params(adapter="law"), with_params(adapter={"sql": 2})}) == 5

    def test_the_model_alone_has_no_owner(self) -> None:
        assert {with_params(), with_params(adapter={"sql": 0})} == {b""}
        assert {with_body(), with_body(model="alias"), with_body(lora=[]), with_body(cache_salt=None)} == {
            b""
        }
        assert chunks_of(PROMPT.encode()) == chunks_of(PROMPT.encode(), b"")

    def test_activated_loras_share_what_precedes_their_invocation(self) -> None:
        assert with_params(adapter="check") == with_body(model="check") == with_body(lora=[{"id": 2}]) == b""
        assert with_params(adapter={"check": 1, "sql": 0.5}) == with_params(adapter={"sql": 0.5}) != b""

    def test_salts(self) -> None:
        assert with_params(cache_salt="s") == with_body(cache_salt="s") != b""
        assert with_params(cache_salt="s", adapter="sql") == with_body(cache_salt="s", model="sql")
        owners = {
            with_params(cache_salt=s, adapter=a) for s in (None, "s", "t") for a in (None, "sql", "law")
        }
        assert len(owners) == 9

    @pytest.mark.parametrize(
        "fields",
        [
            {"model": 5},
            {"model": ["sql"]},
            {"cache_salt": {}},
            {"lora": 5},
            {"lora": "x"},
            {"lora": {"id": 0}},
            {"lora": [5]},
            {"lora": [{}]},
            {"lora": [{"id": 9}]},
            {"lora": [{"id": "0"}]},
            {"lora": [{"id": 0, "scale": 10**400}]},
            {"lora": [{"id": 0, "scale": [1]}]},
            {"lora": [{"id": 0, "scale": "x"}]},
        ],
    )
    def test_what_the_replica_refuses_is_no_error(self, fields: dict[str, Any]) -> None:
        assert with_body(**fields) == b""

    def test_any_text_is_a_salt(self) -> None:
        assert len(with_body(cache_salt="\ud800")) == 16


def test_without_ray_the_error_names_the_extra() -> None:
    program = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        "import llamapipe.ray as lr\n"
        "for name in ('complete', 'openai_app', 'deployment', 'PrefixCostRouter'):\n"
        "    try:\n"
        "        value = getattr(lr, name)\n"
        "        value(None, lr.EngineSpec('m.gguf')) if name == 'complete' else value(lr.EngineSpec('m.gguf'))\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment()
    )
    message = "llamapipe.ray needs ray, which is not installed: pip install 'llamapipe[ray]'"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == message
    assert all("pip install 'llamapipe[ray]'" in line for line in done.stdout.splitlines())
    assert len(done.stdout.splitlines()) == 4
