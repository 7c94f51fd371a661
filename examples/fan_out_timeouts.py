"""Asyncio tasks that share the engine, each with its own time limit; late ones return what they have."""

import asyncio

import llamapipe as lp


async def main() -> None:
    """Asks twelve questions at once."""
    async with lp.Engine(lp.demo_model_path()) as engine:
        params = lp.SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        timeouts = [0.02 if n % 3 == 0 else 60.0 for n in range(12)]
        tasks = [
            engine.agenerate(f"{n}, {n + 1},", params, timeout=seconds, on_timeout="return")
            for n, seconds in enumerate(timeouts)
        ]
        for n, out in enumerate(await asyncio.gather(*tasks)):
            print(f"{n:2}: {out.finish_reason:8} {out.n_completion_tokens:3} tokens {out.text[:30]!r}")


asyncio.run(main())
