"""The inside of an engine, in three rooms by kind.

``policy`` decides, without threads, clocks or native code. ``runtime`` carries the decisions out, with threads and
native calls. ``calls`` goes from the arguments of a call to requests and back. Users do not import these modules; their
names and contents may change in any release.
"""
