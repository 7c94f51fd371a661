"""The public pipeline: a program submits batches and reads their outputs.

``Pipeline.submit`` returns a ``StepOutput`` at once. Reading a value of it waits for that step and no other. ``Trace``
records every stage of every step; the engine drives the same native pipeline through its own executor.
"""
