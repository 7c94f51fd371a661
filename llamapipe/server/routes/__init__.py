"""The routes: each decodes a request, calls the engine and encodes the answer.

Each module holds the routes of one topic. Handlers take a ``Call`` and answer it; they run in a task that is cancelled
when the client disconnects.
"""
