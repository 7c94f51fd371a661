"""A worker for NVIDIA Dynamo (extra ``dynamo``): ``python -m llamapipe.dynamo --model FILE``.

Dynamo's frontend tokenizes, routes and detokenizes; a worker gets token ids and returns token ids. ``requests`` turns
Dynamo's requests into ours and needs no Dynamo, ``worker`` has the class that Dynamo's runtime drives.
"""
