"""Commands that measure a model on this machine: ``bench`` for a number of requests, ``tune`` for options.

``load`` runs requests with random prompts and takes the medians.
"""
