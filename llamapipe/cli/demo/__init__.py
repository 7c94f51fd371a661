"""``llamapipe demo``: several texts that grow at once, then a comparison with a blocking engine.

``command`` is the command, ``board`` draws the texts, ``measure`` runs the same requests both ways.
"""

from llamapipe.cli.demo.command import add_parser, run

__all__ = ["add_parser", "run"]
