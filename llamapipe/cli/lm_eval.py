"""The ``llamapipe-lm-eval`` command: lm-evaluation-harness's own command line, which knows the model ``llamapipe``.

The harness (0.4.13) does not look for plug-ins, so its ``lm_eval`` command cannot find the model by itself.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the harness on the process's arguments and return the exit status.

    The status is 1, with one message on stderr, if the extra ``lm-eval`` is not installed.
    """
    try:
        from llamapipe.lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        fix = 'pip install "llamapipe[lm-eval]"'
        text = str(error) if fix in str(error) else f"{error}; install the extra: {fix}"
        print(f"llamapipe-lm-eval: {text}", file=sys.stderr)
        return 1
    cli_evaluate()
    return 0
