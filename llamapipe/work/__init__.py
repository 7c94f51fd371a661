"""Work that calls hand to other threads.

``tenant`` identifies the client. ``threads`` take turns between clients, and ``long_work`` keeps long work off event
loops. The engine, the embedder and the server's front process use them; nothing here depends on a model.
"""
