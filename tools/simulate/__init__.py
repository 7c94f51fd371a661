"""Simulates engines under load: the real scheduler and prefix cache in virtual time, with the step times of a real run.

``record`` measures the steps of a real engine, ``cost`` fits their times, ``validate`` compares fitted and measured
times, ``node`` runs one scheduler, ``cluster`` runs many nodes with a router, ``workload`` generates arrivals, and
``plots`` draws the results. See ``docs/scale.md``.
"""
