"""Steering a generation: one token at a time, going back where it repeats a word, and adding text of one's own."""

import llamapipe as lp

with lp.Engine(lp.demo_model_path()) as engine:
    params = lp.SamplingParams(max_tokens=200, temperature=0.9, seed=5)
    with engine.start("Once upon a time, there was a", params) as gen:
        seen: set[str] = set()
        while gen.n_tokens < 60:
            token = gen.next()
            if token is None:
                break
            word = token.text.strip()
            if len(word) > 3 and word in seen:
                gen.trim(gen.n_tokens - 1)
                gen.append(engine.model.tokenize(" and then", add_special=False))
                seen.clear()
            seen.add(word)
        print(engine.model.detokenize(gen.token_ids))
