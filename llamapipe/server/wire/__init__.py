"""The types of requests, as msgspec structs: an unknown field is refused.

Each API has its module. ``sampling`` holds the fields they share: the options of llamapipe's ``SamplingParams``.
"""
