"""What the routes share. Nothing here belongs to one route.

From the fields of a request to the parts of its answer: limits, sampling options, tools, media, prompts and
conversations, what is kept of them, and the job that runs in the engine.
"""
