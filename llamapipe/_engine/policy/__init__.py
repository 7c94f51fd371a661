"""Decisions on what to compute next, without threads, clocks or native code; a test proves it.

``core`` has the types that all share, ``queues`` the waiting and the running requests, ``scheduler`` admission and
preemption, ``planner`` the next step, ``kv`` and ``prefix_tree`` the reuse of cells, ``speculation`` guesses, ``turns``
adapters, ``scoring`` which rows score a prompt. The simulation in ``tests/support`` runs these files in virtual time.
"""
