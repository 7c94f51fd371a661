"""Converts callers' images and sounds to pixels and samples.

Files are decoded here, not by libmtmd: Pillow for images (extra ``media``), the standard library for WAV. All sizes are
limited before decoding, because servers pass on files from strangers. ``llama/projector.py`` converts the pixels to the
form that a prompt holds.
"""
