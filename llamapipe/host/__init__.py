"""Facts about the machine and the process: cores, control groups, memory limits, interpreter exit.

Nothing here knows models or llama.cpp.
"""
