"""The formats of answers: one encoder for each API, which takes the parts of an answer and returns bytes.

An encoder knows no request, engine or server, so a test can pass parts to it and check the bytes. ``encoder`` defines
the common interface. ``llamapipe/server/requests/job.py`` runs a request and passes the parts to an encoder.
"""
