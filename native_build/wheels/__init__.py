"""What ``nox -s wheel`` and ``nox -s release`` run: packs wheels for other machines, tries them, compares builds."""
