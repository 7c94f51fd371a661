"""A worker for NVIDIA Dynamo (extra ``dynamo``): ``python -m llamapipe.dynamo --model FILE``.

Dynamo's frontend tokenizes, routes and detokenizes; a worker receives and returns token ids. ``_requests`` converts
Dynamo's requests to ours and does not import Dynamo. ``_worker`` has the class whose methods Dynamo's runtime calls.
"""
