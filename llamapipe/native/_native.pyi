# Types of the compiled cffi module: its contents are declared in cdef/*.h, so they are Any here.
from typing import Any

ffi: Any
lib: Any
