"""The C++ side: cdef texts, our native sources, and ``load``, which finds and opens the built libraries."""
