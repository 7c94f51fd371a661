"""What ``llamapipe serve`` does besides serving.

``start`` takes the port, checks the chat template and tells where the server is. ``settings`` turns options into the
settings of the server.
"""
