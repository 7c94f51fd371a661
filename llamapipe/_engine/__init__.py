"""The inside of an engine. A file is a subsystem, and this list is the architecture.

Policy, without threads, clocks or native code: ``request``, ``scheduler``, ``planner``, ``kv``, ``scoring``.
What carries it out: ``loop``, ``thread``, ``executor``, ``compute_threads``, ``invariance``.
Users do not import these modules; their names and contents may change in any release.
"""
