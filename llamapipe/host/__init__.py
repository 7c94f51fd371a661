"""Facts about the machine and the process: cores, control groups, memory, interpreter exit.

Limits are read from the system each time, because a container's limits can change while it runs. Nothing here knows
models or llama.cpp.
"""
