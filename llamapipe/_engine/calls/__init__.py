"""From the arguments of a call to requests in the engine loop, and from their results to what the call returns.

``prompts`` checks and builds requests, ``chat`` and ``scores`` do so for conversations and scores, ``queue_limit``
bounds the queue, ``submission`` submits requests and collects results. Everything is checked before anything is queued.
"""
