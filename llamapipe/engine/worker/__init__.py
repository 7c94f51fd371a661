"""The engine thread: the loop that plans, launches, samples, commits and delivers steps.

The loop is the only owner of the scheduler. It talks to the model through an ``Executor``, which hides whether a launch
returns before its step is computed. Other threads reach the loop through its inbox.
"""
