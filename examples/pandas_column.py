"""A column of a table completed: one call for all rows; a row that fails keeps its error."""

import pandas as pd

import llamapipe as lp

table = pd.DataFrame({"prompt": ["1, 2, 3,", "", "Monday, Tuesday,", "A, B, C,"]})

with lp.Engine(lp.demo_model_path()) as engine:
    params = lp.SamplingParams(max_tokens=8, temperature=0)
    outs = engine.generate(table["prompt"].tolist(), params, on_error="return")

done = [out if isinstance(out, lp.Completion) else None for out in outs]
table["text"] = [out.text if out else None for out in done]
table["n_tokens"] = [out.n_completion_tokens if out else 0 for out in done]
table["error"] = [None if isinstance(out, lp.Completion) else str(out) for out in outs]
print(table.to_string())
