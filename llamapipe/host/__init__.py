"""Facts about the machine and the process: cores, control groups, memory, interpreter exit.

Functions read limits from the system at each call, because a container's limits can change while it runs. Nothing here
knows models or llama.cpp.
"""
