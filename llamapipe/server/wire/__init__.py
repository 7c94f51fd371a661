"""The shapes of requests, as msgspec types: a field that is not here is refused.

Each API has its module. ``sampling`` holds what they share: the options of llamapipe's ``SamplingParams``.
"""
