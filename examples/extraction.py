"""Extraction: a pydantic object from each of 200 texts, in one call. Needs llamapipe[structured] and pydantic."""

import time
from collections import Counter
from itertools import islice, product
from typing import Literal

from pydantic import BaseModel

import llamapipe as lp


class Sighting(BaseModel):
    """What a text tells."""

    animal: Literal["cow", "cat", "dog", "fox", "bird"]
    is_hungry: bool


animals, places, moods = (
    "cow cat dog fox bird".split(),
    "forest house river garden".split(),
    "hungry sad happy".split(),
)
adjectives = "little big old young".split()
texts = [
    f"Once upon a time, there was a {adjective} {animal} near the {place}. The {animal} was {mood}."
    for adjective, animal, place, mood in islice(product(adjectives, animals, places, moods), 200)
]

with lp.Engine(lp.demo_model_path(), n_ctx=256, n_seq_max=16) as engine:
    # A schema allows line breaks between values. A small model may generate too many of them.
    params = lp.SamplingParams(json_schema=Sighting, temperature=0, bad_words="\n")
    start = time.perf_counter()
    outs = engine.generate([f"{text} JSON: " for text in texts], params)
    seconds = time.perf_counter() - start

sightings = [Sighting.model_validate_json(out.text) for out in outs]
# The bundled model guesses. Correct answers need a larger model.
print(f"{len(sightings)} texts, {len(sightings)} objects in {seconds:.1f} s, such as {sightings[0]!r}")
print(dict(Counter(sighting.animal for sighting in sightings)))
