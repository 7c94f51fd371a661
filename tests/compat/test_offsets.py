"""``text_offset`` of the drop-in, where a character has several tokens."""

from __future__ import annotations

import llamapipe as lp
from llamapipe.compat import Llama


def test_offsets_split_a_prompt_between_its_characters() -> None:
    context, continuation = "é 🦊", "漢 x"
    with Llama(str(lp.demo_model_path()), n_ctx=128, logits_all=True, verbose=False) as llama:
        prompt = context + continuation
        answer = llama.create_completion(prompt, max_tokens=1, logprobs=1, echo=True, temperature=0)
        offsets = answer["choices"][0]["logprobs"]["text_offset"]
        tokens = llama.tokenize(prompt.encode())[1:]
        n_before = sum(offset < len(context) for offset in offsets)
        assert llama.detokenize(tokens[:n_before]).decode() == context
        streamed = list(
            llama.create_completion(context, max_tokens=3, logprobs=1, temperature=0, stream=True)
        )
        first = streamed[0]["choices"][0]["logprobs"]["text_offset"][0]
        assert first == len(context)
