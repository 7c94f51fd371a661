"""The C++ side of llamapipe.

``cdef/`` declares what Python may call, ``src/`` has the native sources, and ``load`` finds and opens the built
libraries. Everything else in the package reaches llama.cpp through ``load``.
"""
