"""Commands that look at an installation: ``doctor`` and ``models``.

``probe`` runs in a process of its own, so that a crash in native code is a finding of the doctor.
"""
