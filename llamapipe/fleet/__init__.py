"""Several processes behind one port: workers that share a model, or several models that share the memory.

Open it for ``llamapipe serve --workers`` and ``--models``. It has three ideas, and files for each:

- What runs. ``_process`` has one process from its start to its end, ``worker`` is what runs in it, ``link`` is what
  the two say to each other. ``placement`` chooses its cores and devices. ``supervisor`` keeps several for one model.
- What may run. ``catalog`` lists the models that may be loaded, ``model_memory`` estimates what each takes, and
  ``budget`` decides which of them end for another one. ``pool`` acts on it: it loads models and ends them.
- Who is asked. ``front`` checks clients and finds the model of a request; ``_proxy`` forwards the request to the
  model's process.

Needs the extra ``server``. The server itself knows nothing of it.
"""
