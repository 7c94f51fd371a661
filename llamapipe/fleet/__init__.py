"""Several processes behind one port: workers that serve one model, or several models that share the memory.

Open it for ``llamapipe serve --workers`` and ``--models``. Its files answer three questions:

- What runs? ``_process`` manages one process from its start to its end, ``worker`` is the code that runs in it, and
  ``link`` has the messages between the two. ``placement`` chooses cores and devices. ``supervisor`` keeps several
  processes running for one model.
- What may run? ``catalog`` lists the models that may be loaded, ``model_memory`` estimates the memory of each, and
  ``budget`` decides which models end to make room. ``pool`` loads models and ends them accordingly.
- Who answers? ``front`` checks clients and finds the model of a request; ``_proxy`` forwards the request to the model's
  process.

It needs the extra ``server``. The server package does not depend on it.
"""
