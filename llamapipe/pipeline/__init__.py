"""The public pipeline: a program submits batches and reads their outputs.

``Pipeline.submit`` returns a ``StepOutput`` immediately. Reading a value of the output waits for that step only.
``Trace`` records every stage of every step. The engine drives the same native pipeline through its own executor.
"""
