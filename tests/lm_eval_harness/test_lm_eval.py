"""The plug-in for lm-evaluation-harness: every value against a plain loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.plain_scores import BOUND, PlainScores

import llamapipe as lp

pytest.importorskip(
    "lm_eval",
    reason='needs lm-evaluation-harness: nox -s lm_eval, or pip install "llamapipe[lm-eval]"',
)

from lm_eval.api.instance import Instance

from llamapipe.lm_eval import LlamapipeLM

pytestmark = pytest.mark.lm_eval

QUESTION = "Question: What does a cow say?\nAnswer:"


def request(kind: str, *arguments: Any) -> Any:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def likelihoods(lm: LlamapipeLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    scores: list[tuple[float, bool]] = lm.loglikelihood(
        [request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True
    )
    return scores


def texts(lm: LlamapipeLM, *pairs: tuple[str, dict[str, Any]]) -> list[str]:
    answers: list[str] = lm.generate_until(
        [request("generate_until", *pair) for pair in pairs], disable_tqdm=True
    )
    return answers


@pytest.fixture(scope="module")
def lm() -> Iterator[LlamapipeLM]:
    lm = LlamapipeLM(path="demo", n_ctx=256, n_threads=1, flash_attn="off")
    yield lm
    lm.close()


@pytest.fixture(scope="module")
def plain(demo: lp.Model) -> Iterator[PlainScores]:
    plain = PlainScores(demo, 256, flash_attn="off")
    yield plain
    plain.close()


class TestScores:
    def test_contexts_and_continuations(self, lm: LlamapipeLM, plain: PlainScores, demo: lp.Model) -> None:
        pairs = [
            (QUESTION, " A cow says moo."),
            (QUESTION, " A cow says woof."),
            ("Once upon a time, ", "there was a fox."),  # the space belongs to what follows
            ("1, 2, 3,", " 4"),
            ("A", "B"),
            ("<|user|>\nHi", "<|end|>\n"),
        ]
        for (context, continuation), answer in zip(pairs, likelihoods(lm, *pairs), strict=True):
            whole = demo.tokenize(context + continuation, parse_special=True)
            n = len(demo.tokenize(context.rstrip(" "), parse_special=True))
            plain.assert_is(answer, whole[:n], whole[n:])

    def test_empty_contexts_begin_with_bos(self, lm: LlamapipeLM, plain: PlainScores, demo: lp.Model) -> None:
        (answer,) = likelihoods(lm, ("", "Once upon a time"))
        plain.assert_is(answer, [demo.bos or 0], demo.tokenize("Once upon a time", add_special=False))

    def test_long_contexts_lose_their_beginning(
        self, lm: LlamapipeLM, plain: PlainScores, demo: lp.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        context = ", ".join(map(str, range(1, 200))) + ","
        (answer,) = likelihoods(lm, (context, " 200, 201."))
        whole, n = demo.tokenize(context + " 200, 201."), len(demo.tokenize(context))
        room = 256 + 1 - (len(whole) - n)
        assert n > room
        plain.assert_is(answer, whole[n - room : n], whole[n:])
        assert "1 of 1 contexts are too long and lost their beginning" in caplog.text

    def test_a_context_that_just_fits(self, lm: LlamapipeLM, caplog: pytest.LogCaptureFixture) -> None:
        (answer,) = lm._loglikelihood_tokens([(None, [5] * 250, [6] * 7)], disable_tqdm=True)
        assert math.isfinite(answer[0])
        assert not caplog.text

    def test_equal_contexts_are_computed_once(self, lm: LlamapipeLM) -> None:
        before = lm.engine.stats().n_prompt_tokens
        likelihoods(lm, *[("Counting from 7 to 30:" * 9, f" {word}") for word in ("a", "b", "c", "d")])
        used = lm.engine.stats().n_prompt_tokens - before
        assert used < 2 * len(lm.tok_encode("Counting from 7 to 30:" * 9))

    def test_whole_texts_are_scored_in_windows(
        self, lm: LlamapipeLM, plain: PlainScores, demo: lp.Model
    ) -> None:
        long = ", ".join(map(str, range(1, 300)))
        documents = ["Once upon a time, there was a fox.", long, "", "A"]
        totals = lm.loglikelihood_rolling(
            [request("loglikelihood_rolling", t) for t in documents], disable_tqdm=True
        )
        for text, total in zip(documents, totals, strict=True):
            expected, n = plain.rolling(text, 256)
            assert total == pytest.approx(expected, abs=BOUND * math.sqrt(max(n, 1)))
        assert totals[2] == 0

    @pytest.mark.parametrize(
        ("pair", "message"),
        [
            (("A", ""), "the continuation of 'A' is empty"),
            (("", ""), "the continuation of '' is empty"),
            (("A", " 1" * 300), "a continuation has 300 tokens and n_ctx is 256; give a larger n_ctx"),
        ],
    )
    def test_what_cannot_be_scored(self, lm: LlamapipeLM, pair: tuple[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            likelihoods(lm, pair)

    def test_no_requests_have_no_answers(self, lm: LlamapipeLM) -> None:
        assert likelihoods(lm) == []
        assert texts(lm) == []
        assert lm.loglikelihood_rolling([], disable_tqdm=True) == []


class TestTexts:
    def test_each_request_has_its_own_arguments(
        self, lm: LlamapipeLM, plain: PlainScores, demo: lp.Model
    ) -> None:
        pairs: list[tuple[str, dict[str, Any]]] = [
            (QUESTION, {"until": ["\n"]}),
            (QUESTION, {"until": "says", "max_gen_toks": 30}),
            ("1, 2, 3,", {"until": [" 7,", ""], "max_gen_toks": 50, "do_sample": False, "temperature": 0.7}),
            ("1, 2, 3,", {"max_new_tokens": 5, "num_beams": 1}),
            ("", {"max_gen_toks": 3}),
        ]
        answers = texts(lm, *pairs)
        assert answers[0] == " A cow says moo."
        assert answers[1] == " A cow "
        assert answers[2] == " 4, 5, 6,"
        assert answers[3] == plain.text(demo.tokenize("1, 2, 3,"), [], 5)
        assert answers[4]

    def test_long_prompts_lose_their_beginning(
        self, lm: LlamapipeLM, plain: PlainScores, demo: lp.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        context = ", ".join(map(str, range(1, 100))) + ","
        (answer,) = texts(lm, (context, {"max_gen_toks": 20, "until": ["."]}))
        assert answer == plain.text(demo.tokenize(context)[-(256 - 20) :], ["."], 20)
        assert "lost their beginning" in caplog.text

    def test_sampling_follows_the_seed(self, lm: LlamapipeLM) -> None:
        hot = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 20, "until": []}
        first, again, other = texts(lm, *[("Once upon a time,", {**hot, "seed": seed}) for seed in (3, 3, 4)])
        assert first == again != other
        assert len(set(texts(lm, *[("Once upon a time,", hot)] * 4))) > 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"stop": ["."]}, "llamapipe has no generation argument 'stop'; it has: until, max_gen_toks,"),
            ({"num_beams": 4}, "num_beams is 4; llamapipe searches no beams"),
            ({"max_gen_toks": 256}, "max_gen_toks is 256 and n_ctx 256, which leaves no place for a prompt"),
            ({"do_sample": True, "top_p": 2.0}, "top_p is 2.0"),
        ],
    )
    def test_what_cannot_be_generated(self, lm: LlamapipeLM, arguments: dict[str, Any], message: str) -> None:
        steps = lm.engine.stats().steps
        with pytest.raises(ValueError, match=message):
            texts(lm, (QUESTION, {"until": ["\n"]}), (QUESTION, arguments))
        assert lm.engine.stats().steps == steps


def test_answers_are_cached(lm: LlamapipeLM, tmp_path: Path) -> None:
    from lm_eval.api.model import CacheHook, CachingLM

    cached = CachingLM(lm, str(tmp_path / "answers.db"))
    try:
        pairs = [(QUESTION, f" {i}") for i in range(300)]  # more than are computed between two writes
        requests = [request("loglikelihood", *pair) for pair in pairs]
        first = cached.loglikelihood(requests)
        prompts = [request("generate_until", QUESTION, {"until": ["."], "max_gen_toks": 9})]
        rolling = [request("loglikelihood_rolling", "A, B, C")]
        others = cached.generate_until(prompts), cached.loglikelihood_rolling(rolling)
        assert len(cached.dbdict) == 302
        steps = lm.engine.stats().steps
        assert cached.loglikelihood(requests) == first
        assert (cached.generate_until(prompts), cached.loglikelihood_rolling(rolling)) == others
        assert lm.engine.stats().steps == steps
    finally:
        cached.dbdict.close()
        lm.set_cache_hook(CacheHook(None))


class TestModel:
    def test_what_the_harness_asks(self, lm: LlamapipeLM, demo: lp.Model) -> None:
        assert (lm.max_length, lm.max_gen_toks, lm.batch_size) == (256, 128, 8)
        assert (lm.eot_token_id, lm.prefix_token_id) == (demo.eos, demo.bos)
        assert (lm.rank, lm.world_size) == (0, 1)
        assert lm.tokenizer_name.startswith("demo.gguf-")
        assert lm.get_model_info()["model_num_parameters"] == demo.n_params

    def test_bos_is_there_once(self, lm: LlamapipeLM, demo: lp.Model) -> None:
        assert lm.tok_encode("Hi") == lm.tok_encode("<s>Hi") == demo.tokenize("Hi")
        assert lm.tok_encode("Hi", add_special_tokens=False) == demo.tokenize("Hi", add_special=False)
        assert lm.tok_encode("1, 2, 3", left_truncate_len=2) == demo.tokenize("1, 2, 3")[-2:]
        assert lm.tok_decode([demo.bos or 0, *demo.tokenize("Hi")]) == "Hi"
        assert lm.tok_decode(demo.eos or 0, skip_special_tokens=False) == "</s>"

    def test_the_choice_of_first_tokens(self) -> None:
        lm = LlamapipeLM(path="demo", n_ctx=64, add_bos_token=False, prefix_token_id=2.0)
        try:
            assert lm.prefix_token_id == 2
            assert lm.tok_encode("") == []
            assert lm.tok_encode("Hi")[0] != lm.model.bos
            assert len(texts(lm, ("", {"max_gen_toks": 2}))) == 1
        finally:
            lm.close()
            lm.close()

    def test_sizes(self) -> None:
        lm = LlamapipeLM(path=str(lp.demo_model_path()), max_length=128, batch_size="4", device="cpu")
        assert (lm.max_length, lm.batch_size, lm.options.n_gpu_layers) == (128, 4, 0)
        lm.close()
        assert lm.model.closed

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "needs the file of a model: --model_args path=model.gguf"),
            ({"path": 5}, "path must be the file of a model, or demo, not 5"),
            ({"path": "demo", "pretrained": "x"}, "no model argument 'pretrained'; it has: path,"),
            ({"path": "demo", "n_ctx": 0}, "n_ctx is 0; it must be from 1"),
            ({"path": "demo", "n_ctx": 1.5}, "n_ctx must be an integer, not float"),
            ({"path": "demo", "n_ctx": 64, "max_length": 65}, "n_ctx is 64 and max_length is 65"),
            ({"path": "demo", "kv_unified": "yes"}, "kv_unified must be True or False"),
            ({"path": "demo", "batch_size": "many"}, "batch_size is 'many'; it must be a whole number"),
            (
                {"path": "demo", "prefix_token_id": 99999},
                "prefix_token_id is 99999; this vocabulary has 2400",
            ),
            ({"path": "demo", "flash_attn": "maybe"}, "flash_attn is 'maybe'"),
            ({"path": "/nowhere.gguf"}, "nowhere.gguf"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises((TypeError, ValueError, lp.errors.ModelLoadError), match=message):
            LlamapipeLM(**arguments)


def test_an_adapter_is_used_for_all_requests(demo: lp.Model) -> None:
    file = lp.demo_model_path().with_name("letters.gguf")
    letter, options = ("Dear Ben, Today we sailed past", " a quiet beach."), {"max_gen_toks": 12, "until": []}
    lm = LlamapipeLM(path="demo", n_ctx=128, n_threads=1, lora=str(file))
    try:
        with demo.load_adapter(file) as adapter, lp.Engine(demo, n_ctx=128, n_threads=1) as engine:
            params = lp.SamplingParams(max_tokens=12, temperature=0, adapter=adapter)
            assert texts(lm, ("Dear Mia,", options)) == [engine.generate("Dear Mia,", params).text]
            ((total, _),) = likelihoods(lm, letter)
            assert total == pytest.approx(engine.score(*letter, adapter=adapter).total, abs=1e-3)
        assert lm.get_model_info()["lora"] == "letters.gguf"
    finally:
        lm.close()
    with pytest.raises(TypeError, match="lora must be the file"):
        LlamapipeLM(path="demo", lora=3)
