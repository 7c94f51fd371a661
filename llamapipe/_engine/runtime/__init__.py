"""Threads and native calls that carry out the policy.

``thread`` owns the engine thread, which runs ``loop``. ``executor`` runs steps over the native pipeline, samplers and
background draws make tokens, sinks and mailboxes deliver them, and wakers wake callers.
"""
