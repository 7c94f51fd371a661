"""The internals of an engine, in three packages.

``policy`` decides, without threads, clocks or native code. ``runtime`` carries the decisions out, with threads and
native calls. ``calls`` turns the arguments of a call into requests, and their results into what the call returns. Users
do not import these modules; their names and contents may change in any release.
"""
