"""The formats of answers: an encoder for each API, which gets parts of an answer and returns bytes.

An encoder knows no request, no engine and no server, so a test gives it parts and looks at the bytes. ``encoder`` says
what all of them have; ``_job`` of the server runs a request and gives the parts to one of them.
"""
