"""Work that calls hand to other threads.

``tenant`` identifies the client. ``threads`` has the threads that take turns between clients. ``long_work`` keeps long
work off event loops. The engine, the embedder and the server's front process use this folder. It depends on no model.
"""
