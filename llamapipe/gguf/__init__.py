"""Checks of GGUF files before llama.cpp reads them.

A damaged or hostile file must cause an error that names the problem. llama.cpp itself may abort the process or read
outside its buffers on such a file, so every count, type, shape and offset is checked here first. Nothing here imports
native code. ``tokenizer_json`` converts a file's vocabulary to the format of the ``tokenizers`` package.
"""
