"""How deeply a body is nested, found before it is decoded: what is computed with the values is recursive."""

from __future__ import annotations

import numpy as np

# Objects and lists inside each other. Python's limit is 1000 calls, and some functions need two for a level.
MAX_DEPTH = 256
_PART = 2**20  # bytes that are looked at together
_STEPS = np.zeros(256, np.int8)  # of each byte
_STEPS[list(b"{[")] = 1
_STEPS[list(b"}]")] = -1


def is_too_deep(body: bytes) -> bool:
    """Whether JSON has more than ``MAX_DEPTH`` levels. For what is no JSON the answer may be wrong."""
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return False
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    depth, in_string = 0, False
    for start in range(0, len(text), _PART):
        part = np.frombuffer(text, np.uint8, min(_PART, len(text) - start), start)
        inside = np.logical_xor.accumulate(part == ord('"')) ^ in_string
        depths = np.cumsum(_STEPS[part] * ~inside, dtype=np.int32)
        if depth + int(depths.max()) > MAX_DEPTH:
            return True
        depth += int(depths[-1])
        in_string = bool(inside[-1])
    return False
