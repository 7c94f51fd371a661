"""Best of n: several choices for one prompt, which is computed once; the most probable one a token wins."""

import llamapipe as lp


def mean_logprob(choice: lp.Choice) -> float:
    """The average log-probability of a choice's tokens."""
    return (choice.cumulative_logprob or 0.0) / max(len(choice.token_ids), 1)


with lp.Engine(lp.demo_model_path()) as engine:
    params = lp.SamplingParams(n=6, max_tokens=30, temperature=1.0, seed=1, logprobs=0)
    out = engine.generate("Once upon a time, there was a", params)
    for choice in sorted(out.choices, key=mean_logprob, reverse=True):
        print(f"{mean_logprob(choice):6.2f}  seed {choice.seed}  {choice.text[:60]!r}")
    print(f"{out.n_prompt_tokens} prompt tokens, {out.n_completion_tokens} generated")
