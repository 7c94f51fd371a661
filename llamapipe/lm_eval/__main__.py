"""``python -m llamapipe.lm_eval``: the harness's own command line, with the model ``llamapipe`` registered."""

from lm_eval.__main__ import cli_evaluate

import llamapipe.lm_eval  # noqa: F401  (registers)

if __name__ == "__main__":
    cli_evaluate()
