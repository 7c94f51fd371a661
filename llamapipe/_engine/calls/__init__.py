"""Turns the arguments of a call into requests for the engine loop, and their results into return values.

``prompts`` checks and builds requests, ``chat`` and ``scores`` do so for conversations and scores, ``queue_limit``
bounds the queue, ``submission`` submits requests and collects results. All arguments are checked before any request is
queued.
"""
