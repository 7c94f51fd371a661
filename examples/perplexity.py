"""Perplexity of texts: how well the model predicts each token, given the text before it."""

import llamapipe as lp

story = "Once upon a time, there was a little fox. The fox was hungry and went to look for food. " * 8
noise = " ".join(reversed(story.split()))

with lp.Engine(lp.demo_model_path()) as engine:
    print("story", round(engine.perplexity(story), 2))
    print("noise", round(engine.perplexity(noise), 2))
    print("as llama.cpp's tool counts, windows of 64:", round(engine.perplexity(story, n_window=64), 2))
