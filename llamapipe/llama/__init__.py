"""llama.cpp's objects as Python owners: synchronous, without threads or policy, usable on their own."""

from llamapipe.llama.batch import Batch
from llamapipe.llama.context import Context
from llamapipe.llama.devices import Device, devices
from llamapipe.llama.model import Model, demo_model_path
from llamapipe.llama.sampler import SamplerChain
from llamapipe.llama.vocab import Vocab

__all__ = ["Batch", "Context", "Device", "Model", "SamplerChain", "Vocab", "demo_model_path", "devices"]
