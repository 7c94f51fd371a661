"""Builds llama.cpp and the cffi module for llamapipe; used by ``build_native.py`` and by the package build."""
