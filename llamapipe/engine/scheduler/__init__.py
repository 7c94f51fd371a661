"""Which requests run in each step, and what the step computes. Pure policy: no threads, clocks or native code.

The scheduler keeps the queue, the slots and the running requests. The batch builder turns these into the plan of one
step. Everything here is called from one thread.
"""
