# Given to llama.cpp's build as CMAKE_PROJECT_INCLUDE.
# Other bindings ship libllama.so.0 and libggml-base.so.0 too, and the loader takes a library that is already in the
# process for every other of that name. So ours have names of their own. Backend modules are opened by their path and
# keep llama.cpp's names, by which its loader finds them.
set(CMAKE_SHARED_LIBRARY_PREFIX "libllamapipe-")
