"""Mixed traffic for hours, and what it leaves behind: ``python tests/soak --hours 2``."""
