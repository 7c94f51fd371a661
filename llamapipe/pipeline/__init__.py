"""The public pipeline: batches in, outputs out.

``Pipeline.submit`` returns at once; nothing waits until a value of a ``StepOutput`` is read, and then only for that
step. ``Trace`` records every stage of every step. The engine uses the same native pipeline, through its own executor.
"""
