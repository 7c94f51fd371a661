"""Packs wheels for other machines, tries them and compares builds, for ``nox -s wheel`` and ``nox -s release``."""
