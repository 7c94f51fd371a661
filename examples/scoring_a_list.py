"""Scoring a list: how probable the model finds each text, and its least probable token."""

import math

import llamapipe as lp

texts = ["1, 2, 3, 4, 5, 6", "1, 2, 3, 4, 9, 2", "Monday, Tuesday, Wednesday", "Monday, Wednesday, Tuesday"]

with lp.Engine(lp.demo_model_path()) as engine:
    scores = engine.score_tokens([engine.model.tokenize(text) for text in texts], progress=True)
    for text, score in zip(texts, scores, strict=True):
        least = int(score.logprobs.argmin())
        piece = engine.model.piece(score.token_ids[least]).decode(errors="replace")
        print(f"{math.exp(-score.total / len(score.logprobs)):8.2f}  {text!r}, least probable: {piece!r}")
