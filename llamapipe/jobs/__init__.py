"""Runs batch jobs: each record gets exactly one result, no matter how often the job is stopped.

A bounded number of records is in flight. The results file holds only whole lines and shows which records are left.
"""
