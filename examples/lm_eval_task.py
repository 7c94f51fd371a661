"""lm-evaluation-harness: a custom task, evaluated with many concurrent requests. Needs llamapipe[lm-eval]."""

from typing import Any

import lm_eval
from datasets import Dataset

import llamapipe.lm_eval  # noqa: F401 - registers the model "llamapipe"

SOUNDS = {"cow": "moo", "cat": "meow", "dog": "woof", "bird": "tweet"}


def questions(**options: Any) -> dict[str, Dataset]:
    """The task's data. A task may also name a data set or a file."""
    rows = [
        {
            "question": f"What does a {animal} say?",
            "choices": [f" A {animal} says {sound}." for sound in SOUNDS.values()],
        }
        for animal in SOUNDS
    ]
    return {"test": Dataset.from_list([row | {"gold": gold} for gold, row in enumerate(rows)])}


task = {
    "task": "sounds",
    "custom_dataset": questions,
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
results = lm_eval.simple_evaluate(model="llamapipe", model_args="path=demo", tasks=[task], bootstrap_iters=0)
assert results is not None
print({name: value for name, value in results["results"]["sounds"].items() if name.startswith("acc")})
