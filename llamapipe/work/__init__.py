"""Work that calls leave to other threads.

``tenant`` says for whom it is done. ``threads`` take turns between clients, and ``long_work`` keeps what takes long
from event loops. The engine, the embedder and the server's front process use them; nothing here knows a model.
"""
