"""What a request asks of its text, in an engine: grammars, schemas, processors and every sampler."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from support.random_schemas import SchemaMaker

import llamapipe as lp
from llamapipe._sampling_table import SAMPLER_ORDER
from llamapipe.errors import ConstraintError, DecodeError, InvalidRequestError

MakeEngine = Callable[..., lp.Engine]
Row = npt.NDArray[np.float32]

START = "Once upon a time"
ANSWER = 'root ::= ("yes" | "no") ", " [0-9]+ "."'


@pytest.fixture
def engine(make_engine: MakeEngine, demo: lp.Model) -> lp.Engine:
    return make_engine(demo, n_ctx=512, n_seq_max=4)


def wild(**options: Any) -> lp.SamplingParams:
    """Draws that the model would hardly make by itself."""
    return lp.SamplingParams(
        **{"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 200, **options}
    )


class TestConstraints:
    def test_200_random_schemas_at_once(self, engine: lp.Engine) -> None:
        """The issue's own test, through the engine: different schemas and samplers in every step."""
        schemas = [SchemaMaker(seed).schema() for seed in range(200)]
        samplers: list[dict[str, Any]] = [
            {},
            {"temperature": 1.5, "top_k": 0, "min_p": 0},
            {"temperature": 0},
            {"typical_p": 0.9, "repeat_penalty": 1.3},
            {"mirostat": 2},
            {"top_n_sigma": 1.5, "xtc_probability": 0.3},
        ]
        params = [
            lp.SamplingParams(json_schema=schema, max_tokens=None, seed=i, **samplers[i % len(samplers)])
            for i, schema in enumerate(schemas)
        ]
        outs = engine.generate([START] * 200, params)
        valid = 0
        for schema, out in zip(schemas, outs, strict=True):
            assert out.finish_reason == "stop", out.text
            jsonschema.validate(json.loads(out.text), schema)
            valid += 1
        assert valid == 200

    def test_texts_follow_each_kind_of_constraint(self, engine: lp.Engine) -> None:
        for i in range(10):
            assert re.fullmatch("[a-c]{3,5}", engine.generate(START, wild(regex="[a-c]{3,5}", seed=i)).text)
            assert re.fullmatch("a+b", engine.generate(START, wild(lark='start: "a"+ "b"', seed=i)).text)
            assert re.fullmatch(
                r"(yes|no), [0-9]+\.", engine.generate(START, wild(grammar=ANSWER, seed=i)).text
            )
        schema = {"enum": ["red", "green", 3]}
        assert json.loads(engine.generate(START, wild(json_schema=schema)).text) in schema["enum"]
        assert json.loads(engine.generate(START, wild(json_schema=json.dumps(schema))).text) in schema["enum"]

    def test_one_of_the_given_texts(self, engine: lp.Engine) -> None:
        texts = ["yes", "no", "yesterday", '"né"\n\\', "a" * 40]
        outs = engine.generate([START] * 30, [wild(choice=texts, seed=i) for i in range(30)])
        assert {out.text for out in outs} <= set(texts) and {out.finish_reason for out in outs} == {"stop"}
        assert len({out.text for out in outs}) > 2
        answer = engine.chat([{"role": "user", "content": "Is it?"}], wild(choice=["Yes.", "No."]))
        assert answer.content in ("Yes.", "No.")

    def test_a_space_before_a_text_is_not_in_it(self, engine: lp.Engine) -> None:
        """After "Answer:", the token of running text begins with a space."""
        model = engine.model
        (spaced,) = model.tokenize(" the", add_special=False)
        prefers: dict[str, Any] = {"logit_bias": {spaced: 100.0}, "choice": ["the", "a"], "temperature": 0}
        params = lp.SamplingParams(**prefers, logprobs=0)
        out = engine.generate(START, params)
        assert (out.text, list(out.token_ids), out.finish_reason) == ("the", [spaced], "stop")
        assert [entry.id for entry in out.logprobs or ()] == [spaced]
        assert engine.generate(START, replace(params, max_tokens=1)).text == "the"
        assert "".join(delta.text for delta in engine.stream(START, params)) == "the"
        assert engine.generate(START, replace(params, stop=(" ", "z"))).text == "the"
        assert engine.chat("Which?", params).content == "the"
        assert engine.generate(START, replace(params, choice=("the end", "a"))).text == "the end"

    def test_a_space_before_a_text_is_the_callers_if_one_begins_with_it(self, engine: lp.Engine) -> None:
        (spaced,) = engine.model.tokenize(" the", add_special=False)
        prefers: dict[str, Any] = {"logit_bias": {spaced: 100.0}, "temperature": 0}
        assert engine.generate(START, lp.SamplingParams(choice=[" the", " a"], **prefers)).text == " the"
        assert engine.generate(START, lp.SamplingParams(choice=[" the", "a"], **prefers)).text == " the"
        assert engine.generate(START, lp.SamplingParams(choice=["\nthe", "a"], **prefers)).text in (
            "\nthe",
            "a",
        )
        out = engine.generate(START, lp.SamplingParams(choice=["the"], **prefers))
        assert (out.text, b"".join(map(engine.model.piece, out.token_ids))) == ("the", b"the")

    def test_a_space_alone_is_a_token_only_where_a_text_needs_it(self, engine: lp.Engine) -> None:
        """Else ``max_tokens=1`` would end after the space."""
        model = engine.model
        (space,) = model.tokenize(" ", add_special=False)
        prefers: dict[str, Any] = {"logit_bias": {space: 100.0}, "temperature": 0}
        out = engine.generate(START, lp.SamplingParams(choice=["the", "a"], **prefers))
        assert space not in out.token_ids and out.text in ("the", "a")
        assert model.tokenize(" 好", add_special=False)[0] == space
        out = engine.generate(START, lp.SamplingParams(choice=["好", "é"], **prefers))
        assert out.token_ids[0] == space and out.text in ("好", "é")
        few = lp.SamplingParams(choice=["好", "é"], max_tokens=3, **prefers)
        assert engine.generate(START, few).token_ids[0] != space  # four tokens have no room

    def test_a_generation_that_starts_again_has_no_space_either(self, engine: lp.Engine) -> None:
        model = engine.model
        (the,) = model.tokenize(" the", add_special=False)
        params = lp.SamplingParams(choice=["the the", "a"], logit_bias={the: 100.0}, temperature=0)
        with engine.start(START, params) as generation:
            n = generation.n_tokens
            texts = []
            while (token := generation.next()) is not None:
                texts.append(token.text)
            assert texts == ["the", " the"]
            generation.trim(n)
            again = generation.next()
            assert again is not None and again.text == "the"
            generation.trim(n)
            generation.append([the])
            after = generation.next()
            assert after is not None and after.text == " the"

    @pytest.mark.parametrize(
        ("choice", "error", "message"),
        [
            ("yes", TypeError, "choice must be a sequence, not str"),
            ([], ValueError, "choice is empty"),
            (["a", ""], ValueError, "choice holds an empty string"),
            (["a", 1], TypeError, "choice must hold strings, not int"),
        ],
    )
    def test_a_wrong_choice(self, choice: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            lp.SamplingParams(choice=choice)

    def test_json_has_the_spaces_that_are_asked_for(self, engine: lp.Engine) -> None:
        """By default, one after each colon and comma: small models otherwise spend their tokens on line breaks."""
        numbers = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}
        schema: dict[str, Any] = {"type": "object", "properties": {"a": numbers}, "required": ["a"]}
        schema["additionalProperties"] = False
        text = engine.model.tokenize("\n \t", add_special=False)
        biased = {"json_schema": schema, "logit_bias": dict.fromkeys(text, 1e3), "max_tokens": 400}
        spaced = engine.generate(START, wild(seed=1, **biased)).text
        assert spaced == json.dumps(json.loads(spaced))
        compact = engine.generate(START, wild(seed=1, json_whitespace="compact", **biased)).text
        assert compact == json.dumps(json.loads(compact), separators=(",", ":"))
        flexible = engine.generate(START, wild(seed=1, json_whitespace="flexible", **biased)).text
        assert len(flexible) > len(spaced) > len(compact)
        chat = engine.chat("Numbers, please.", wild(max_tokens=99), response_format=schema).content
        assert chat == json.dumps(json.loads(chat))
        with pytest.raises(
            ValueError, match="json_whitespace is 'none'; it must be 'spaced', 'compact' or 'flexible'"
        ):
            lp.SamplingParams(json_whitespace="none")  # type: ignore[arg-type]

    def test_different_ones_among_free_ones(self, engine: lp.Engine) -> None:
        params = [
            wild(regex="[0-9]{8}"),
            wild(max_tokens=8),
            wild(grammar=ANSWER),
            wild(lark='start: "x"~5'),
        ] * 5
        outs = engine.generate([START] * 20, params)
        for i in range(0, 20, 4):
            assert re.fullmatch("[0-9]{8}", outs[i].text)
            assert re.fullmatch(r"(yes|no), [0-9]+\.", outs[i + 2].text)
            assert outs[i + 3].text == "xxxxx"

    def test_streams_and_generations(self, engine: lp.Engine) -> None:
        params = wild(regex="[a-c]{30}", seed=4)
        expected = engine.generate(START, params)
        deltas = list(engine.stream(START, params))
        assert "".join(d.text for d in deltas) == expected.text
        assert deltas[-1].finish_reason == expected.finish_reason == "stop"
        with engine.start(START, params) as generation:
            assert [t.id for t in generation] == expected.token_ids
            assert generation.finish_reason == "stop"

        async def several() -> list[str]:
            async def text_of(seed: int) -> str:
                return "".join(
                    [d.text async for d in engine.astream(START, wild(regex="[a-c]{9}", seed=seed))]
                )

            return list(await asyncio.gather(*[text_of(seed) for seed in range(6)]))

        assert all(re.fullmatch("[a-c]{9}", text) for text in asyncio.run(several()))

    def test_stop_strings_end_it_before(self, engine: lp.Engine) -> None:
        out = engine.generate(START, wild(regex="[a-c]{50}x", stop="c", seed=1))
        assert re.fullmatch("[ab]*", out.text)
        assert out.finish_reason == "stop"

    def test_a_text_may_be_cut(self, engine: lp.Engine) -> None:
        out = engine.generate(START, wild(regex="a{500}", max_tokens=5))
        assert (out.finish_reason, len(out.token_ids)) == ("length", 5)

    def test_several_of_one_prompt(self, engine: lp.Engine) -> None:
        outs = engine.generate(START, wild(regex="[a-f]{12}", n=6)).choices
        assert all(re.fullmatch("[a-f]{12}", out.text) for out in outs)
        assert len({out.text for out in outs}) > 1

    @pytest.mark.parametrize("kind", ["regex", "grammar"])
    def test_a_generation_that_is_cut(self, engine: lp.Engine, kind: str) -> None:
        constraint = (
            {"regex": "[a-z]+[0-9]{4}"} if kind == "regex" else {"grammar": "root ::= [a-z]+ [0-9]{4}"}
        )
        with engine.start(START, wild(seed=3, max_tokens=None, **constraint)) as generation:
            n = generation.n_tokens
            for _ in range(3):
                assert generation.next() is not None
            generation.trim(n + 1)
            generation.append(engine.model.tokenize("7", add_special=False)[-1:])
            rest = [t.text for t in generation]
        text = engine.model.detokenize(generation.token_ids[n:])
        assert re.fullmatch("[a-z]+[0-9]{4}", text.strip()), (text, rest)

    @pytest.mark.parametrize("kind", ["regex", "grammar"])
    def test_what_is_appended_has_to_follow(self, engine: lp.Engine, kind: str) -> None:
        constraint = {"regex": "a+"} if kind == "regex" else {"grammar": 'root ::= "a"+'}
        with engine.start(START, wild(max_tokens=None, **constraint)) as generation:
            assert generation.next() is not None
            generation.append(engine.model.tokenize("7", add_special=False)[-1:])
            with pytest.raises(InvalidRequestError):
                generation.next()
        assert engine.generate(START, wild(regex="[ab]")).text in "ab"

    @pytest.mark.parametrize(
        ("constraint", "message"),
        [
            ({"regex": "(a"}, "regex.*unclosed group"),
            ({"json_schema": {"type": "strin"}}, "json_schema.*strin"),
            ({"json_schema": "{"}, "json_schema"),
            ({"lark": "start: nothing"}, r"lark.*at 1\("),
            ({"grammar": "root ::= ("}, "grammar: .*line 1 column"),
            ({"grammar": "other ::= [a-z]"}, "grammar: .*root"),
            ({"grammar": "root ::= root"}, "grammar"),
            ({"grammar": ANSWER, "ignore_eos": True}, "leave ignore_eos off"),
        ],
    )
    def test_what_cannot_be_compiled(
        self, engine: lp.Engine, constraint: dict[str, Any], message: str
    ) -> None:
        for ask in (engine.generate, engine.stream, engine.start):
            with pytest.raises(InvalidRequestError, match=re.compile(message, re.DOTALL)):
                ask(START, lp.SamplingParams(**constraint))

    def test_one_that_turns_out_too_complex_is_a_wrong_request(self, engine: lp.Engine) -> None:
        """No check before the start finds it; servers answer 400, as the same request would fail again."""
        params = [
            wild(regex="(?:.*[aeiou].{1,30}){1,30}", ignore_eos=True, seed=1),
            wild(max_tokens=4, ignore_eos=True),
        ]
        bad, good = engine.generate([START] * 2, params, on_error="return")
        assert isinstance(bad, ConstraintError)
        assert "the grammar stopped after" in str(bad) and "too many expressions" in str(bad)
        assert isinstance(good, lp.Completion) and len(good.token_ids) == 4

    def test_the_next_request_has_a_fresh_lexer(self, engine: lp.Engine) -> None:
        """Matchers of a grammar share a lexer: one request that took it to its limit failed all that followed."""
        grammar = "(?:.*[aeiou].{1,29}){1,30}"
        with pytest.raises(ConstraintError, match="too many expressions"):
            engine.generate(START, wild(regex=grammar, ignore_eos=True, seed=1))
        assert engine.generate(START, wild(regex=grammar, max_tokens=2, seed=1)).finish_reason == "length"

    def test_what_allows_nothing_fails_alone(self, engine: lp.Engine) -> None:
        """Only digits may be drawn, and only letters are in the grammar."""
        digits = engine.model.tokenize("7 8 9", add_special=False)
        with pytest.raises(DecodeError, match="leave no token to sample"):
            engine.generate(START, wild(regex="[a-c]+", allowed_token_ids=digits))
        other = threading.Thread(target=lambda: None)
        other.start()
        other.join()
        assert engine.generate(START, wild(max_tokens=3)).finish_reason == "length"

    @pytest.mark.parametrize("kind", ["regex", "grammar"])
    def test_a_generation_cut_into_its_prompt(self, engine: lp.Engine, kind: str) -> None:
        constraint = {"regex": "[a-c]{6}"} if kind == "regex" else {"grammar": "root ::= [a-c]{6}"}
        prompt = engine.model.tokenize(START)
        with engine.start(prompt, wild(seed=3, max_tokens=None, **constraint)) as generation:
            for _ in range(2):
                generation.next()
            generation.trim(len(prompt) - 2)
            text = "".join(token.text for token in generation)
        assert re.fullmatch("[a-c]{6}", text)

    def test_tokens_appended_before_the_first_are_prompt(self, engine: lp.Engine) -> None:
        with engine.start(START, wild(seed=3, max_tokens=None, regex="[a-c]{6}")) as generation:
            generation.append(engine.model.tokenize(" there", add_special=False))
            n = generation.n_tokens
            for _ in range(3):
                generation.next()
            generation.trim(n + 1)
            for _ in generation:
                pass
            assert re.fullmatch("[a-c]{6}", engine.model.detokenize(generation.token_ids[n:]).strip())

    @pytest.mark.parametrize(
        "constraint", [{"regex": "ab"}, {"grammar": 'root ::= "ab"'}, {"lark": 'start: "ab"'}]
    )
    def test_a_text_that_is_complete_may_be_short(
        self, engine: lp.Engine, constraint: dict[str, str]
    ) -> None:
        out = engine.generate(START, wild(min_tokens=10, **constraint))
        assert (out.text, out.finish_reason) == ("ab", "stop")

    @pytest.mark.parametrize("constraint", [{"regex": "[a-z ]*"}, {"grammar": "root ::= [a-z ]*"}])
    def test_one_that_need_not_end_does_not(self, engine: lp.Engine, constraint: dict[str, str]) -> None:
        for seed in range(5):
            assert len(engine.generate(START, wild(min_tokens=10, seed=seed, **constraint)).token_ids) >= 10

    @pytest.mark.parametrize(
        "constraint", [{"grammar": 'root ::= [a-z ]+ "."'}, {"regex": r"[a-z ]+\."}, {"min_tokens": 8}]
    )
    def test_infill_ends_only_where_it_may(self, engine: lp.Engine, constraint: dict[str, Any]) -> None:
        """llama.cpp's own would choose the end whatever is forbidden, and then end the process.

        It would do so at the first token whose probabilities are nearly equal, as here: few seeds tell.
        """
        for seed in range(4):
            out = engine.generate(START, wild(infill=True, seed=seed, max_tokens=8, **constraint))
            assert out.finish_reason == "length" or "min_tokens" not in constraint

    def test_exact_in_every_way_of_sampling(self, engine: lp.Engine) -> None:
        """The same seeds give the same texts, whatever else is in the batch."""
        params = [wild(regex="[a-h]{20}", seed=i) for i in range(8)]
        alone = [engine.generate(START, p).text for p in params]
        together = [out.text for out in engine.generate([START] * 8, params)]
        assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 7


class TestProcessors:
    def test_they_change_the_row(self, engine: lp.Engine) -> None:
        seen: list[tuple[Any, ...]] = []

        def only_300(row: Row) -> None:
            seen.append((row.dtype.name, row.shape, row.flags.writeable, threading.current_thread().name))
            row[:] = -np.inf
            row[300] = 0

        out = engine.generate(START, wild(logits_processors=[only_300], max_tokens=4))
        assert out.token_ids == [300] * 4
        assert set(seen) == {("float32", (engine.model.n_vocab,), True, "llamapipe-sampling")}

    def test_one_after_another_on_a_copy(self, engine: lp.Engine) -> None:
        def add(row: Row) -> None:
            row[7] = 1e4

        def double(row: Row) -> None:
            assert row[7] == 1e4
            row[8] = 2 * row[7]

        params = wild(logits_processors=[add, double], max_tokens=2, temperature=0, logprobs=1)
        free = wild(max_tokens=2, temperature=0)
        outs = engine.generate([START, START], [params, free])
        assert outs[0].token_ids == [8, 8]
        assert outs[1].token_ids == engine.generate(START, free).token_ids

    def test_one_that_raises_fails_its_own_request(self, engine: lp.Engine) -> None:
        def bad(row: Row) -> None:
            raise KeyError("mine")

        streams = [engine.stream(START, wild(max_tokens=30, ignore_eos=True)) for _ in range(3)]
        with pytest.raises(KeyError, match="mine"):
            engine.generate(START, wild(logits_processors=[bad]))
        assert [sum(len(d.token_ids) for d in stream) for stream in streams] == [30, 30, 30]

    @pytest.mark.parametrize("value", [np.nan, -np.inf])
    def test_one_that_leaves_nothing(self, engine: lp.Engine, value: float) -> None:
        def spoil(row: Row) -> None:
            row[:] = value

        with pytest.raises(DecodeError):
            engine.generate(START, wild(logits_processors=[spoil]))

    def test_with_a_schema(self, engine: lp.Engine) -> None:
        def favour_digits(row: Row) -> None:
            row[engine.model.tokenize("7", add_special=False)[-1]] += 50

        out = engine.generate(START, wild(regex="[0-9]{6}", logits_processors=[favour_digits]))
        assert re.fullmatch("[0-9]{6}", out.text)

    def test_logprobs_are_the_models_own(self, engine: lp.Engine) -> None:
        def favour(row: Row) -> None:
            row[300] += 100

        changed = engine.generate(START, wild(logits_processors=[favour], logprobs=2, max_tokens=1)).logprobs
        biased = engine.generate(START, wild(logit_bias={300: 100}, logprobs=2, max_tokens=1)).logprobs
        assert changed == biased
        assert changed is not None and changed[0].id == 300 and changed[0].top[0][0] != 300

    def test_equal_ones_are_not_the_same(self, engine: lp.Engine) -> None:
        class Equal:
            def __init__(self) -> None:
                self.n_calls = 0

            def __call__(self, row: Row) -> None:
                self.n_calls += 1

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Equal)

            def __hash__(self) -> int:
                return 1

        a, b = Equal(), Equal()
        for processor in (a, b):
            engine.generate(START, wild(logits_processors=[processor], max_tokens=3, ignore_eos=True))
        assert (a.n_calls, b.n_calls) == (3, 3)

    def test_one_that_asks_its_engine(self, engine: lp.Engine) -> None:
        for ask in (
            engine.stats,
            engine.close,
            lambda: engine.generate(START),
            lambda: engine.score(START, " there was"),
        ):
            with pytest.raises(RuntimeError, match="a thread of the engine"):
                engine.generate(START, wild(logits_processors=[lambda row, ask=ask: ask()]), timeout=60)
        assert not engine.closed

    def test_one_that_exits(self, engine: lp.Engine) -> None:
        def leave(row: Row) -> None:
            raise SystemExit(3)

        with pytest.raises(DecodeError, match=r"raised SystemExit\(3\)"):
            engine.generate(START, wild(logits_processors=[leave]))
        assert engine.generate(START, wild(max_tokens=2, ignore_eos=True)).finish_reason == "length"

    def test_one_that_takes_the_row_away(self, engine: lp.Engine) -> None:
        def shrink(row: Row) -> None:
            row.resize(0, refcheck=False)

        with pytest.raises(ValueError, match=r"made the row \(0,\)"):
            engine.generate(START, wild(logits_processors=[shrink]))

    def test_one_that_returns_another_array(self, engine: lp.Engine) -> None:
        """As those of transformers do: what they return would be ignored."""

        def favour(tokens: list[int], row: Row) -> Row:
            return np.where(np.arange(len(row)) == 300, row + 100, row)

        with pytest.raises(ValueError, match=r"returned another array, which is not used; .* row\[:\] = "):
            engine.generate(START, wild(logits_processors=[favour]))
        for same in (lambda row: row, lambda row: row[:5], lambda row: np.float32(row[0])):
            assert engine.generate(START, wild(logits_processors=[same], max_tokens=2, ignore_eos=True)).text


class TestSamplers:
    """Every sampler of llama.h is reachable and does what it is named after."""

    def texts(self, engine: lp.Engine, n: int = 8, **options: Any) -> list[str]:
        params = [lp.SamplingParams(**{"seed": i, "max_tokens": 24, **options}) for i in range(n)]
        return [out.text for out in engine.generate([START] * n, params)]

    @pytest.mark.parametrize(
        "options",
        [
            {"mirostat": 1},
            {"mirostat": 2, "mirostat_tau": 2.0},
            {"adaptive_target": 0.3},
            {"adaptive_target": 0.3, "adaptive_decay": 0.5, "top_k": 0},
            {"xtc_probability": 1.0, "xtc_threshold": 0.05, "min_p": 0},
            {"dry_multiplier": 0.8},
            {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["a"]},
            {"top_n_sigma": 1.0},
            {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0},
            {"typical_p": 0.5},
            {"infill": True},
            {"repeat_penalty": 1.3, "sampler_order": ("temperature", "top_k", "penalties")},
            {"dry_multiplier": 0.8, "sampler_order": ("top_k", "dry", "temperature")},
            {"sampler_order": ()},
            {"sampler_order": SAMPLER_ORDER[::-1], "infill": True, "xtc_probability": 0.5},
        ],
    )
    def test_same_seed_same_text(self, engine: lp.Engine, options: dict[str, Any]) -> None:
        together = self.texts(engine, **options)
        alone = [
            engine.generate(START, lp.SamplingParams(**{"seed": i, "max_tokens": 24, **options})).text
            for i in range(8)
        ]
        assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 6

    def test_xtc_drops_the_first(self, engine: lp.Engine) -> None:
        prompt = "Once upon a time there was a little"
        (first,) = engine.generate(prompt, lp.SamplingParams(temperature=0, max_tokens=1)).token_ids
        cut: dict[str, Any] = {"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_p": 0, "top_p": 1}
        params = [lp.SamplingParams(seed=i, max_tokens=1, **cut) for i in range(20)]
        assert first not in {out.token_ids[0] for out in engine.generate([prompt] * 20, params)}
        # It drops none if it would leave too few.
        cut |= {"min_keep": engine.model.n_vocab}
        params = [lp.SamplingParams(seed=i, max_tokens=1, **cut) for i in range(20)]
        assert first in {out.token_ids[0] for out in engine.generate([prompt] * 20, params)}

    def test_dry_ends_a_repetition(self, engine: lp.Engine) -> None:
        again = engine.model.tokenize(" a cat and a dog and a cat and a dog and a cat and", add_special=False)
        free = engine.generate(again, lp.SamplingParams(temperature=0, max_tokens=1)).token_ids[0]
        dry = lp.SamplingParams(temperature=0, max_tokens=1, dry_multiplier=50, dry_sequence_breakers=())
        repeated = again[again.index(again[-1]) + 1]
        out = engine.generate(again, dry).token_ids[0]
        assert out not in (repeated, free) if free == repeated else out != repeated

    def test_a_narrow_sigma_is_greedy(self, engine: lp.Engine) -> None:
        greedy = engine.generate(START, lp.SamplingParams(temperature=0, max_tokens=10)).text
        assert set(self.texts(engine, n=4, top_n_sigma=1e-6, max_tokens=10)) == {greedy}

    def test_allowed_tokens_and_bad_words(self, engine: lp.Engine) -> None:
        outs = engine.generate([START] * 4, wild(allowed_token_ids=[300, 301, 302], max_tokens=20))
        assert {t for out in outs for t in out.token_ids} <= {300, 301, 302}
        with_it = self.texts(engine, temperature=0)
        word = max(re.findall("[a-z]{3,}", with_it[0]), key=len)
        assert word in with_it[0]
        for text in self.texts(engine, bad_words=[word], temperature=0):
            assert word not in text.split()

    def test_so_many_tokens_at_least(self, engine: lp.Engine) -> None:
        eos = engine.model.eos
        assert eos is not None
        for n in (0, 1, 7):
            out = engine.generate(START, lp.SamplingParams(logit_bias={eos: 1000}, min_tokens=n))
            assert (len(out.token_ids), out.finish_reason) == (n, "stop")

    def test_stop_tokens_wait_as_well(self, engine: lp.Engine) -> None:
        params = lp.SamplingParams(logit_bias={300: 1000}, stop_token_ids=[300], min_tokens=3)
        out = engine.generate(START, params)
        assert len(out.token_ids) == 3 and 300 not in out.token_ids

    def test_infill_needs_an_end(self, engine: lp.Engine) -> None:
        with pytest.raises(InvalidRequestError, match="infill needs a token that ends generation"):
            engine.generate(START, lp.SamplingParams(infill=True, ignore_eos=True))

    @pytest.mark.parametrize(
        "order", [("top_k", "penalties", "temperature"), ("dry", "penalties", "temperature")]
    )
    def test_greedy_draws_are_penalized_in_every_order(
        self, engine: lp.Engine, order: tuple[str, ...]
    ) -> None:
        params = lp.SamplingParams(
            temperature=0, repeat_penalty=1e6, max_tokens=40, sampler_order=order, repeat_last_n=-1
        )
        tokens = engine.generate(START, params).token_ids
        assert len(set(tokens)) == len(tokens)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mirostat": 1, "infill": True}, "mirostat and infill"),
            ({"mirostat": 1, "adaptive_target": 0.1}, "mirostat and adaptive_target"),
            ({"mirostat": 1, "temperature": 0}, "mirostat draws, but temperature is 0"),
            ({"infill": True, "temperature": 0}, "infill draws, but temperature is 0"),
        ],
    )
    def test_what_would_do_nothing_is_refused(
        self, engine: lp.Engine, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            engine.generate(START, lp.SamplingParams(**options))

    @pytest.mark.parametrize("options", [{"mirostat": 2}, {"adaptive_target": 0.3}, {"xtc_probability": 0.5}])
    def test_a_cut_generation_goes_on_differently(self, engine: lp.Engine, options: dict[str, Any]) -> None:
        with engine.start(
            START, lp.SamplingParams(seed=1, max_tokens=None, ignore_eos=True, **options)
        ) as generation:
            n = generation.n_tokens
            continuations = set()
            for _ in range(6):
                for _ in range(6):
                    generation.next()
                continuations.add(tuple(generation.token_ids[n:]))
                generation.trim(n)
        assert len(continuations) > 2

    def test_an_order_without_a_stage_does_without_it(self, engine: lp.Engine) -> None:
        """All logits stay, and a high temperature makes anything possible."""
        params = lp.SamplingParams(
            temperature=1e5, sampler_order=["temperature"], max_tokens=20, ignore_eos=True
        )
        outs = engine.generate([START] * 5, params)
        assert len({t for out in outs for t in out.token_ids}) > 60
