"""The internals of an engine, in three packages.

``policy`` decides, without threads, clocks or native code. ``runtime`` carries out the decisions, with threads and
native calls. ``calls`` turns the arguments of a call into requests, and the results of requests into return values.
Users do not import these modules; their names and contents may change in any release.
"""
