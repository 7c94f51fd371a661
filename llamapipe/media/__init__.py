"""Converts callers' images and sounds to pixels and samples.

This package decodes files, not libmtmd: images with Pillow (extra ``media``), WAV files with numpy. All sizes are
limited before decoding, because servers pass on files from strangers. ``llama/projector.py`` converts pixels and
samples to the form that a prompt holds.
"""
