"""From sampled tokens to the callers that wait for them.

A sink turns a request's tokens into what its caller asked for and puts that into a mailbox. The dispatcher
wakes waiting threads one after another and each event loop once a step, at the next launch, when the GIL is free.
A chat's deltas are parsed here as they arrive, and a progress bar counts finished prompts.
"""
