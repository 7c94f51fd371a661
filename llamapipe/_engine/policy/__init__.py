"""Decides what to compute next, without threads, clocks or native code. A test checks that none of them is imported.

``core`` has the shared types, ``queues`` the waiting and running requests, ``scheduler`` admission and preemption.
``planner`` plans the next step, ``kv`` and ``prefix_tree`` reuse cells, ``speculation`` chooses guesses, ``turns``
chooses adapters, ``scoring`` says which rows score a prompt. The simulation in ``tests/support`` runs these files in
virtual time.
"""
