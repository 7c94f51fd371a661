"""dspy: a typed prediction and an agent that calls a tool."""

import os

import dspy

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
lm = dspy.LM(
    f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=200, cache=False
)
dspy.configure(lm=lm)


class Country(dspy.Signature):
    """Name the country of a city."""

    city: str = dspy.InputField()
    country: str = dspy.OutputField()
    in_europe: bool = dspy.OutputField()


prediction = dspy.Predict(Country)(city="Paris")
assert "France" in prediction.country, prediction
dspy.configure(adapter=dspy.JSONAdapter())
prediction = dspy.Predict(Country)(city="Rome")
assert "Ital" in prediction.country, prediction
print("did: typed predictions by markers and by a schema")
