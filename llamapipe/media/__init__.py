"""Images and sounds of callers, as pixels and samples.

Files are decoded here, not by libmtmd: Pillow for images (extra ``media``), the standard library for WAV. Everything is
limited before it is decoded, because servers pass on what strangers send. ``llama/projector.py`` turns the pixels into
what a prompt holds.
"""
