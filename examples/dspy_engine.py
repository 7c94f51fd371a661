"""DSPy: llamapipe as DSPy's engine, in process; typed outputs, and an evaluation whose threads share the steps."""

from collections.abc import Iterator
from typing import Any, Literal

import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage, response_to_events

import llamapipe as lp


class LlamapipeEngine:
    """Answers DSPy's requests with ``engine.chat``. Any thread; DSPy owns retries, caching and history."""

    supports_response_schema = True
    supported_params = ("temperature", "max_tokens", "stop", "seed", "response_format")

    def __init__(self, engine: lp.Engine) -> None:
        self._engine = engine

    def complete(self, request: Request) -> Response:
        """One answer."""
        messages = [{"role": message.role, "content": message.text or ""} for message in request.messages]
        system = request.system
        if system is not None:
            texts = (
                [system] if isinstance(system, str) else [p.text for p in system if isinstance(p, TextPart)]
            )
            messages.insert(0, {"role": "system", "content": "".join(texts)})
        config = request.config
        params = lp.SamplingParams(
            max_tokens=config.max_tokens or 128,
            temperature=0.0 if config.temperature is None else config.temperature,
            stop=config.stop,
            seed=config.seed,
        )
        wanted = config.response_format  # JSONAdapter passes a signature's outputs as a schema
        schema = None if wanted is None else wanted.get("schema", {"type": "object"})
        answer = self._engine.chat(messages, params, response_format=schema)
        counts = (answer.n_prompt_tokens, answer.n_completion_tokens)
        return Response(
            id=None,
            model=request.model,
            message=Message.assistant(answer.content),
            finish_reason="length" if answer.finish_reason == "length" else "stop",
            usage=Usage(input_tokens=counts[0], output_tokens=counts[1], total_tokens=sum(counts)),
        )

    def stream(self, request: Request) -> Iterator[Any]:
        """The same as events."""
        yield from response_to_events(self.complete(request))

    def close(self) -> None:
        """The engine belongs to its owner."""


class Sound(dspy.Signature):
    """Say which sound an animal makes."""

    animal: str = dspy.InputField()
    sound: Literal["moo", "meow", "woof", "tweet"] = dspy.OutputField()


def is_right(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> bool:
    """Whether the sound is the animal's."""
    return bool(example.sound == prediction.sound)


def main() -> None:
    """Evaluates a program in eight threads."""
    sounds = {"cow": "moo", "cat": "meow", "dog": "woof", "bird": "tweet"}
    examples = [
        dspy.Example(animal=f"{adjective} {animal}", sound=sound).with_inputs("animal")
        for adjective in ("little", "big", "old", "young")
        for animal, sound in sounds.items()
    ]
    with lp.Engine(lp.demo_model_path(), n_ctx=1024) as engine:
        lm = dspy.LM("llamapipe/demo", engine=LlamapipeEngine(engine), cache=False)
        dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
        program = dspy.Predict(Sound)
        print("one answer:", program(animal="cow").sound)
        before = engine.stats()
        result = dspy.Evaluate(devset=examples, metric=is_right, num_threads=8)(program)
        after = engine.stats()
        n_tokens = after.n_completion_tokens - before.n_completion_tokens
        print(
            f"{len(examples)} examples, score {result.score}: {n_tokens} tokens in {after.steps - before.steps} steps"
        )


main()
