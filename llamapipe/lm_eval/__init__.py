"""The plug-in for lm-evaluation-harness (extra ``lm-eval``).

Importing this package registers the model ``llamapipe`` with the harness.
"""

try:
    # First: the harness fills its registry only while that is empty, so its own models have to be there already.
    import lm_eval.models  # noqa: F401
except ImportError as error:
    raise ImportError(
        f'llamapipe.lm_eval needs the harness ({error}): pip install "llamapipe[lm-eval]"'
    ) from error

from llamapipe.lm_eval._model import LlamapipeLM

__all__ = ["LlamapipeLM"]
