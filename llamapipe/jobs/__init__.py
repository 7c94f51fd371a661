"""Batch jobs: a file of requests in, a file of results out, each record exactly once however often the job is stopped.

The engine is kept full with a bounded number of records; results are written as whole lines.
"""
