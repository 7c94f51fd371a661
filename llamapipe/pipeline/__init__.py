"""From a step's batch to its outputs."""
