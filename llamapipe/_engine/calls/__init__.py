"""From the arguments of a call to requests in the engine loop, and from their results to what the call returns.

``prompts`` checks and builds requests, ``chat`` and ``scores`` do for conversations and scores, ``queue_limit`` bounds
the queue, ``submission`` submits and collects. Everything is checked here, before anything is queued.
"""
