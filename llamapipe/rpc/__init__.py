"""Devices of other machines, through llama.cpp's ggml-rpc.

Addresses are checked and workers asked for their protocol here in Python, because ggml-rpc ends the process where it
cannot connect. Nothing of ggml-rpc is loaded before the first model with ``rpc=`` or the first worker.
"""
