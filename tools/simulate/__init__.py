"""Simulates engines under load: the real scheduler and prefix cache in virtual time, with the step times of a real run.

``record`` measures the steps of a real engine, ``cost`` fits their times, ``validate`` compares both, ``node`` runs one
scheduler, ``cluster`` many behind a router, ``workload`` makes arrivals, ``plots`` draws. See ``docs/scale.md``.
"""
