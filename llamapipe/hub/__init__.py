"""Model files from the Hugging Face Hub.

``reference`` chooses files among the names in a repository; it is pure. ``download`` asks the hub or its cache through
huggingface_hub, which is the extra ``hub``. Nothing here knows about models.
"""
