"""The engine: what callers hold.

``Engine`` serves any number of threads and asyncio tasks from one llama.cpp context. The subpackages
follow a request: ``frontend`` checks and submits it, ``llamapipe._engine`` decides when it runs and runs it, and
``delivery`` hands out its results.
"""
