"""Python owners of llama.cpp's objects: models, vocabularies, contexts, batches, samplers, devices.

Each owner checks its arguments before it calls llama.cpp and frees its object in ``close``. The code is synchronous: it
has no threads and no policy, and every owner can be used without the engine.
"""

from llamapipe.llama.batch import DecodeBatch
from llamapipe.llama.context import Context
from llamapipe.llama.devices import Device, devices
from llamapipe.llama.model import Model, demo_model_path
from llamapipe.llama.sampler import SamplerChain
from llamapipe.llama.vocab import Vocab

__all__ = ["Context", "DecodeBatch", "Device", "Model", "SamplerChain", "Vocab", "demo_model_path", "devices"]
