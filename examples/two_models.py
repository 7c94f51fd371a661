"""Two models in one process: one writes, the other judges what was written."""

import llamapipe as lp

with (
    lp.Engine(lp.demo_model_path(), n_threads=1) as writer,
    lp.Engine(lp.demo_model_path(), n_threads=1) as judge,  # any other GGUF file
):
    prompt = "Once upon a time, there was a"
    drafts = writer.generate(prompt, lp.SamplingParams(n=4, max_tokens=24, seed=3)).choices
    scores = judge.score(prompt, [draft.text for draft in drafts])
    for draft, score in zip(drafts, scores, strict=True):
        print(f"{score.total:8.2f}  {draft.text!r}")
