"""Types: what each call returns, as `mypy --strict` and pyright see it; this program passes both."""

import asyncio

import llamapipe as lp


async def ask(engine: lp.Engine) -> list[str]:
    """Completes two prompts."""
    outs: list[lp.Completion] = await engine.agenerate(["1, 2,", "A, B,"], lp.SamplingParams(max_tokens=4))
    return [out.text for out in outs]


with lp.Engine(lp.demo_model_path(), type_k="f16", tuning=lp.EngineTuning(ring="auto")) as engine:
    completion: lp.Completion = engine.generate("1, 2, 3,", lp.SamplingParams(max_tokens=4, n=2, logprobs=1))
    texts: tuple[str, ...] = tuple(choice.text for choice in completion.choices)
    several: list[lp.Completion] = engine.generate([[1, 2], [3]], lp.SamplingParams(max_tokens=2))
    kept: list[lp.Completion | Exception] = engine.generate(["a", ""], on_error="return")
    score: lp.Score = engine.score("1, 2,", " 3")
    scores: list[lp.Score] = engine.score("1, 2,", [" 3", " 4"])
    nested: list[list[lp.Score]] = engine.score(["1, 2,", "A,"], [[" 3", " 4"], [" B"]])
    print(texts, len(several), [type(item).__name__ for item in kept], score.total > scores[1].total)
    print([len(row) for row in nested], asyncio.run(ask(engine)))
