"""Batch jobs: records in, results out, each record exactly once however often the job is stopped.

The engine is kept full with a bounded number of records. A file of results holds whole lines, and says what is left.
"""
