"""The calls for threads, made by ``tools/unasync.py`` from those for asyncio.

Never edit these files: edit ``llamapipe/engine.py``, ``llamapipe/streams.py`` or the submission, and run the tool. Only
the words that asyncio needs are left out here, so there is nothing to read that is not in those files.
"""
