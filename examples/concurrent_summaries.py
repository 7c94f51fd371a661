"""Many prompts together, with a progress bar, each answer printed as soon as it is finished."""

import llamapipe as lp

articles = [f"Once upon a time, there was a little fox number {n}. The fox was hungry." for n in range(20)]

with lp.Engine(lp.demo_model_path()) as engine:
    params = lp.SamplingParams(max_tokens=30, temperature=0)
    for index, out in engine.iter_completed(articles, params, progress=True):
        print(f"[{index}] {out.text.strip()[:60]!r}  {out.n_completion_tokens} tokens, {out.finish_reason}")
