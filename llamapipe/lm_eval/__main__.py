"""``python -m llamapipe.lm_eval``: the harness's own command line, with the model ``llamapipe`` registered."""

# First: it registers the model, and its error names the extra if the harness is missing.
import llamapipe.lm_eval  # noqa: F401, I001
from lm_eval.__main__ import cli_evaluate

__all__ = ["cli_evaluate"]

if __name__ == "__main__":
    cli_evaluate()
