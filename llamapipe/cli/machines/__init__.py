"""Commands that join machines. ``rpc-worker`` lends the devices of one to a model that runs on another."""
