"""From a caller's arguments to submitted requests, on the caller's thread.

Prompts and options are checked here, before any C call. A checked prompt becomes a ``Request`` with a sink for its
results and a factory for its sampler. One submission path enters the queue, submits, and cancels
if the caller gives up.
"""
