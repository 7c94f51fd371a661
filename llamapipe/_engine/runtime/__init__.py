"""Threads and native calls that carry the policy out.

``thread`` owns the engine thread, ``loop`` is what it does, ``executor`` runs steps over the native pipeline, samplers
and background draws make tokens, sinks and mailboxes deliver them, and wakers wake callers.
"""
