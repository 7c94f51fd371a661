"""A chat's reasoning ends when its budget is used up, and the answer follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.chat_families import FAMILIES, TOOLS
from support.chat_templates import template
from support.gguf_models import tiny_model
from support.scripted_model import scripted_model

import llamapipe as lp
from llamapipe.errors import InvalidRequestError

HELLO: Any = [{"role": "user", "content": "How far is it?"}]
THOUGHT = "Is it far? The road has bends, so it may be 40 km, or a little more than that."
# Two end reasoning with several control tokens, which a table of bigrams cannot continue.
NAMES = [name for name, family in FAMILIES.items() if family.think and name not in ("gpt-oss", "Kimi K3")]


def greedy(budget: int | None, **more: Any) -> lp.SamplingParams:
    return lp.SamplingParams(temperature=0, max_tokens=400, reasoning_budget=budget, **more)


@contextmanager
def thinking(path: Path, name: str, answer: str = "Yes, 40 km.") -> Iterator[lp.Engine]:
    """An engine whose model thinks, and then answers."""
    family = FAMILIES[name]
    assert family.think is not None
    begin, end = family.think
    chat_template = template(family.template)
    text = f"{begin}{THOUGHT}{end}{answer}"
    if chat_template.render(HELLO).rstrip().endswith(begin.strip()):
        text = text.removeprefix(begin)
    specials = tuple(dict.fromkeys((*family.specials, begin.strip(), end.strip())))
    with (
        lp.Model(scripted_model(path / "said.gguf", text, specials, chat_template.text)) as model,
        lp.Engine(model, n_ctx=8192, n_seq_max=4) as engine,
    ):
        yield engine


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_ends_at_its_budget(tmp_path: Path, name: str) -> None:
    with thinking(tmp_path, name) as engine:
        whole = engine.chat(HELLO, greedy(None))
        assert whole.reasoning.strip() == THOUGHT
        assert engine.chat(HELLO, greedy(1000)).choices[0].token_ids == whole.choices[0].token_ids
        for budget in (1, 4):
            answer = engine.chat(HELLO, greedy(budget))
            assert answer.content.strip() == whole.content.strip() == "Yes, 40 km."
            assert THOUGHT.startswith(answer.reasoning.strip()) and answer.reasoning.strip() != THOUGHT
            assert answer.finish_reason == "stop"
            parts = list(engine.stream_chat(HELLO, greedy(budget)))
            assert "".join(part.reasoning for part in parts) == answer.reasoning
            assert "".join(part.content for part in parts) == answer.content
        assert engine.chat(HELLO, greedy(0)).reasoning.strip() == ""
        assert engine.chat(HELLO, greedy(0)).content.strip() == "Yes, 40 km."


def test_a_message_precedes_the_end(tmp_path: Path) -> None:
    with thinking(tmp_path, "Hermes") as engine:
        answer = engine.chat(HELLO, greedy(3, reasoning_budget_message="Enough!"))
        assert answer.reasoning.endswith("Enough!")
        assert answer.content.strip() == "Yes, 40 km."


def test_names_of_control_tokens_in_a_message_stay_text(tmp_path: Path) -> None:
    with thinking(tmp_path, "Hermes") as engine:
        (start,) = engine.model.tokenize("<think>", add_special=False, parse_special=True)
        choice = engine.chat(HELLO, greedy(3, reasoning_budget_message="<think>")).choices[0]
        assert choice.reasoning.endswith("<think>")
        assert choice.token_ids.count(start) == 1, "the model's own"


def test_several_choices_and_log_probabilities(tmp_path: Path) -> None:
    with thinking(tmp_path, "Hermes") as engine:
        answer = engine.chat(HELLO, greedy(2, n=3, logprobs=2))
        for choice in answer.choices:
            assert choice.content.strip() == "Yes, 40 km."
            assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        # What no row proposed is as improbable as it was.
        assert min(entry.logprob for entry in answer.choices[0].logprobs or ()) < -5


@pytest.mark.parametrize("schema", [True, False])
def test_a_constraint_of_the_answer_holds_after_it(tmp_path: Path, schema: bool) -> None:
    text = '{"km": 40}'
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
    with thinking(tmp_path, "Hermes", text if schema else call) as engine:
        wanted: dict[str, Any] = {
            "type": "object",
            "properties": {"km": {"type": "integer"}},
            "required": ["km"],
        }
        options: dict[str, Any] = (
            {"response_format": wanted} if schema else {"tools": TOOLS, "tool_choice": "required"}
        )
        for budget in (0, 2, 1000):
            answer = engine.chat(HELLO, greedy(budget), **options)
            assert (answer.reasoning.strip() == THOUGHT) == (budget == 1000)
            if schema:
                assert answer.content.replace(" ", "") == '{"km":40}'
            else:
                assert [call.name for call in answer.tool_calls] == ["get_weather"]


def test_markers_in_pieces_are_found(tmp_path: Path) -> None:
    """A vocabulary without the markers writes them as text, here in pieces of three characters and more."""
    chat_template = template(FAMILIES["Hermes"].template)
    text = f"<think>\n{THOUGHT}\n</think>\n\nYes, 40 km."
    with (
        lp.Model(scripted_model(tmp_path / "said.gguf", text, (), chat_template.text)) as model,
        lp.Engine(model, n_ctx=1024, n_seq_max=1) as engine,
    ):
        n = len(engine.chat(HELLO, greedy(None)).choices[0].token_ids)
        answer = engine.chat(HELLO, greedy(n))
        assert (answer.reasoning.strip(), answer.content.strip()) == (THOUGHT, "Yes, 40 km.")
        written = model.detokenize(engine.chat(HELLO, greedy(5)).choices[0].token_ids)
        thought, end, _ = written.removeprefix("<think>\n").partition("</think>")
        assert end and thought and THOUGHT.startswith(thought)


def test_gpt_oss_goes_to_its_final_channel(tmp_path: Path) -> None:
    family = FAMILIES["gpt-oss"]
    chat_template = template(family.template)
    text = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
    with (
        lp.Model(scripted_model(tmp_path / "said.gguf", text, family.specials, chat_template.text)) as model,
        lp.Engine(model, n_ctx=4096, n_seq_max=1) as engine,
    ):
        answer = engine.chat(HELLO, greedy(4))
        written = model.vocab.detokenize(answer.choices[0].token_ids, unparse_special=True)
        thought, _, rest = written.partition("<|end|><|start|>assistant<|channel|>final<|message|>")
        assert rest and THOUGHT.startswith(thought.removeprefix("<|channel|>analysis<|message|>"))
        assert thought.removeprefix("<|channel|>analysis<|message|>") == answer.reasoning


def test_sampled_texts_are_closed_at_the_same_token(tmp_path: Path) -> None:
    """Several callers in a memory that is too small for all, so that some are preempted and continued."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    with (
        lp.Model(tiny_model(tmp_path / "t.gguf"), chat_template=source) as model,
        lp.Engine(model, n_ctx=128, n_seq_max=8, n_cells=192, n_threads=1) as engine,
    ):
        params = lp.SamplingParams(seed=3, n=8, max_tokens=60, reasoning_budget=6, ignore_eos=True)
        end = model.tokenize("</think>", add_special=False, parse_special=True)
        for choice in engine.chat(HELLO, params).choices:
            assert choice.token_ids[6 : 6 + len(end)] == end
            assert choice.content
        assert engine.stats().n_preempted


def test_a_model_that_does_not_reason_is_not_limited(demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=256, n_seq_max=1) as engine:
        limited = engine.chat(HELLO, greedy(0))
        assert limited.content == engine.chat(HELLO, greedy(None)).content != ""


def test_wrong_budgets_are_refused(demo: lp.Model) -> None:
    assert lp.SamplingParams(reasoning_budget=-1).reasoning_budget is None
    for value, error in ((-2, ValueError), (2**31, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="reasoning_budget"):
            lp.SamplingParams(reasoning_budget=value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reasoning_budget_message"):
        lp.SamplingParams(reasoning_budget_message=3)  # type: ignore[arg-type]
    with lp.Engine(demo, n_ctx=256, n_seq_max=1) as engine:
        with pytest.raises(InvalidRequestError, match=r"limits the reasoning of chats.*stream_chat"):
            engine.generate("a", lp.SamplingParams(reasoning_budget=3))
        assert engine.generate("a", lp.SamplingParams(max_tokens=2)).token_ids
