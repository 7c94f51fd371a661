"""Builds llama.cpp and the cffi module for llamapipe, for ``build_native.py`` and for the package build."""
