"""A worker for NVIDIA Dynamo (extra ``dynamo``): ``python -m llamapipe.dynamo --model FILE``.

Dynamo's frontend tokenizes, routes and detokenizes; a worker receives and returns token ids. ``requests`` converts
Dynamo's requests to ours and does not import Dynamo. ``worker`` has the class whose methods Dynamo's runtime calls.
"""
