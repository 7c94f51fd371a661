"""From sampling parameters to samplers.

A sampler that may take long for one token, because of a constraint or a logits processor, runs in threads of its own.
The engine thread never waits for it by more than half a step.
"""
