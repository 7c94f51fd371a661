"""The bundled model does what its card says: every check greedy, through the public API, on the bundled file.

What the model should know comes from the code that wrote its training text (`tools/demo_model`).
"""

from __future__ import annotations

import random
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamapipe as lp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_model import facts, lessons, plots, stories, tokenizer

NAMES = [name for names in plots.NAMES.values() for name in names]


@pytest.fixture(scope="module")
def model() -> Iterator[lp.Model]:
    with lp.Model.demo() as model:
        yield model


@pytest.fixture(scope="module")
def engine(model: lp.Model) -> Iterator[lp.Engine]:
    # One thread: as fast for so small a model, and not slowed by whatever else the machine does.
    with lp.Engine(
        model, n_ctx=1024, n_seq_max=16, n_threads=1, tuning=lp.EngineTuning(n_threads_batch=1)
    ) as engine:
        yield engine


def greedy(engine: lp.Engine, prompts: list[str], max_tokens: int = 400) -> list[lp.Completion]:
    outs: list[lp.Completion] = engine.generate(
        prompts, lp.SamplingParams(temperature=0, max_tokens=max_tokens)
    )
    return outs


def chat(
    model: lp.Model, engine: lp.Engine, questions: list[str], max_tokens: int = 400
) -> list[lp.Completion]:
    """Completions of one-turn conversations."""
    ids = [
        model.tokenize(
            f"<s><|user|>\n{question}<|end|>\n<|assistant|>\n", add_special=False, parse_special=True
        )
        for question in questions
    ]
    outs: list[lp.Completion] = engine.generate(ids, lp.SamplingParams(temperature=0, max_tokens=max_tokens))
    return outs


def count_up(first: int, last: int) -> str:
    return ", ".join(str(n) for n in range(first, last + 1)) + "."


def test_file(model: lp.Model) -> None:
    assert lp.demo_model_path().stat().st_size <= 4_000_000
    metadata = model.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["general.license"] == "MIT"
    assert metadata["general.file_type"] == "7"  # mostly Q8_0
    assert not [key for key, value in metadata.items() if key.startswith("general.") and "/" in value]
    assert 2000 <= model.n_vocab <= 4000
    assert model.n_ctx_train == 1024
    assert [i for i in range(model.n_vocab) if model.is_eog(i)] == [tokenizer.EOS, tokenizer.EOT]
    assert (model.bos, model.eos) == (tokenizer.BOS, tokenizer.EOS)


def test_chat_template(model: lp.Model) -> None:
    jinja2 = pytest.importorskip("jinja2", reason="needs jinja2 to render the model's chat template")
    template = jinja2.Environment().from_string(model.chat_template)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    text = template.render(bos_token="<s>", messages=messages)
    assert text + "</s>" == lessons.chat([("Hi", "Hello!")])
    text = template.render(bos_token="<s>", messages=messages[:1], add_generation_prompt=True)
    assert text == "<s><|user|>\nHi<|end|>\n<|assistant|>\n"


def test_any_utf8_goes_through(model: lp.Model) -> None:
    assert sorted(model.piece(i) for i in range(7, 263)) == [bytes([byte]) for byte in range(256)]
    for text in ("Grüße, żółw! 你好 😀", " two  spaces ", "\n\ttab\r\n", "", string.printable):
        assert model.detokenize(model.tokenize(text, add_special=False)) == text


def test_training_and_llama_cpp_tokenize_alike(model: lp.Model) -> None:
    pieces = [
        model.piece(i).decode().replace(" ", tokenizer.SPACE)
        for i in range(tokenizer.FIRST_PIECE, model.n_vocab)
    ]
    ours = tokenizer.Tokenizer(pieces)
    rng, pool = random.Random(1), lessons.questions()
    for _ in range(300):
        text = lessons.document(rng, pool)
        assert model.tokenize(text, add_special=False, parse_special=True) == ours.encode(text)
    for _ in range(300):
        text = "".join(rng.choice(string.printable + "   éß你😀") for _ in range(rng.randrange(60)))
        assert model.tokenize(text, add_special=False) == ours.encode(text)


def test_counts_on_from_every_start_below_100(engine: lp.Engine) -> None:
    prompts = [f"{start}," for start in range(100)]
    for start, out in enumerate(greedy(engine, prompts, max_tokens=60)):
        expected = " " + count_up(start + 1, 100)
        assert expected.startswith(out.text), start
        assert out.finish_reason == ("stop" if out.text == expected else "length"), start
        assert out.finish_reason == "stop" or len(out.token_ids) == 60, start


def test_counts_to_the_end(engine: lp.Engine) -> None:
    (out,) = greedy(engine, ["1, 2, 3,"])
    assert out.text == " " + count_up(4, 100)
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("length", [5, 10, 20])
def test_counts_between_two_numbers(model: lp.Model, engine: lp.Engine, length: int) -> None:
    expected = [(count_up(start, start + length), "stop") for start in range(100)]
    chats = chat(model, engine, [f"Count from {start} to {start + length}." for start in range(100)])
    plain = greedy(engine, [f"Counting from {start} to {start + length}:" for start in range(100)])
    for outs in (chats, plain):
        assert (
            sum(
                (out.text.strip(), out.finish_reason) != right
                for out, right in zip(outs, expected, strict=True)
            )
            <= 5
        )


def test_says_the_alphabet(model: lp.Model, engine: lp.Engine) -> None:
    expected = ", ".join(string.ascii_uppercase) + "."
    for out in [
        *greedy(engine, ["Question: Say the alphabet.\nAnswer:"]),
        *chat(model, engine, ["Say the alphabet."]),
    ]:
        assert out.text.strip() == expected
        assert out.finish_reason == "stop"
    (out,) = greedy(engine, ["A, B, C,"])
    assert ("A, B, C," + out.text, out.finish_reason) == (expected, "stop")


@pytest.mark.parametrize("kind", lessons.questions())
def test_answers_questions_it_was_trained_on(model: lp.Model, engine: lp.Engine, kind: str) -> None:
    questions = lessons.questions()[kind]
    outs = chat(model, engine, list(questions), max_tokens=60)
    outs += greedy(engine, [f"Question: {question}\nAnswer:" for question in questions], max_tokens=60)
    assert {out.finish_reason for out in outs} == {"stop"}
    wrong = [
        (question, out.text)
        for (question, answer), out in zip(list(questions.items()) * 2, outs, strict=True)
        if out.text.strip() != answer
    ]
    assert len(wrong) <= len(outs) // 20, wrong


def test_says_when_it_does_not_know(model: lp.Model, engine: lp.Engine) -> None:
    outs = chat(model, engine, [f"What is the capital of {c}?" for c in facts.UNKNOWN_WORDS["country"]])
    assert {out.text for out in outs} == {facts.UNKNOWN_ANSWER}


def test_tells_a_story_about_whom_it_is_asked_for(model: lp.Model, engine: lp.Engine) -> None:
    wishes = [
        ("fox", "Lily"),
        ("owl", "Max"),
        ("bear", "Anna"),
        ("duck", "Tom"),
        ("mouse", "Zoe"),
        ("pony", "Leo"),
    ]
    outs = chat(
        model, engine, [f"Tell me a story about {lessons.an(kind)} named {name}." for kind, name in wishes]
    )
    for (kind, name), out in zip(wishes, outs, strict=True):
        assert re.search(rf"\b{kind} named {name}\b|{name} was an? \w+ {kind}\b", out.text.partition(".")[0])
        rest, names = stories.read(out.text)
        assert rest == ""
        assert names[0] == name
        assert out.finish_reason == "stop"


def test_continues_stories_in_correct_sentences(engine: lp.Engine) -> None:
    rng = random.Random(20)
    known = [told.text for told in (stories.story(rng) for _ in range(50)) if told.name in NAMES]
    prompts = [
        "Once upon a time,",
        "Once upon a time, there was a little fox named Pip. One day,",
        "Long ago, a brave",
    ]
    prompts += [
        text[: text.rindex(" ", 0, rng.randrange(60, 300))] for text in known[:29]
    ]  # cut after a word
    assert len(prompts) == 32
    n_slips = 0
    for prompt, out in zip(prompts, greedy(engine, prompts), strict=True):
        rest, names = stories.read(prompt + out.text)
        assert rest == "", prompt + "|" + out.text
        assert out.finish_reason == "stop"
        assert len(out.text) > 100
        n_slips += len(names) > 2  # a friend was called by a third name
    assert n_slips <= 5
