"""The handlers of all routes, a file for each API or subject. ``ROUTES`` of ``application`` lists them.

A handler checks its request, has the answer computed and encoded, and knows nothing of connections or keys.
"""
