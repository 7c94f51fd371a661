"""Several processes on one port: a supervisor without a model, and workers that each have a model and an engine.

The supervisor accepts connections and hands each one to the worker with the fewest. It starts workers anew when they
end, and replaces them one after the other on SIGHUP. Metrics of all workers are added up.
"""
