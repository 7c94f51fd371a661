"""The public pipeline: a program submits batches and reads their outputs.

``Pipeline.submit`` returns a ``StepOutput`` immediately. Reading one of its values waits for that step only. ``Trace``
records every stage of every step; the engine drives the same native pipeline through its own executor.
"""
