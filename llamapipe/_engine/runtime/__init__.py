"""Carries out the decisions of ``policy``, with threads and native calls.

``thread`` owns the engine thread, which runs ``loop``. ``executor`` runs steps in the native pipeline, samplers and
background draws choose tokens, sinks and mailboxes deliver them, and wakers wake callers.
"""
