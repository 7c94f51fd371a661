"""Batch jobs: records in, results out, each record exactly once, no matter how often the job is stopped.

A bounded number of records keeps the engine full. A file of results holds whole lines and shows which records are left.
"""
