"""Structured output: JSON that a schema describes, from every text of a list. Needs llamapipe[structured]."""

import json

import llamapipe as lp

schema = {
    "type": "object",
    "properties": {"animal": {"enum": ["cow", "cat", "dog", "fox"]}, "is_hungry": {"type": "boolean"}},
    "required": ["animal", "is_hungry"],
    "additionalProperties": False,
}
texts = ["The fox was hungry and went to look for food.", "The cat slept all day."]

with lp.Engine(lp.demo_model_path()) as engine:
    params = lp.SamplingParams(json_schema=schema, temperature=0, max_tokens=60)
    for text, out in zip(texts, engine.generate([f"{text} JSON: " for text in texts], params), strict=True):
        print(text, json.loads(out.text))
