"""Writes the trained network and its vocabulary as a GGUF file."""

from pathlib import Path

import gguf
import numpy as np
from make_model import finish
from torch import Tensor

from .network import Network
from .tokenizer import BOS, CONTROLS, EOS, EOT, UNK, Tokenizer

# The form of llama.cpp's built-in template for <|user|>, <|assistant|> and <|end|>.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def write_gguf(path: Path, network: Network, tokenizer: Tokenizer) -> None:
    """Writes `path`: matrices as Q8_0, norms as float32, and no output matrix, because it is the embedding."""
    shape = network.shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("llamapipe demo")
    writer.add_description(
        "A tiny model for llamapipe's first run: little stories, counting, simple questions."
    )
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.n_rot)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    _write_vocabulary(writer, tokenizer)
    for name, weight in network.state_dict().items():
        writer_name = name.replace("blocks.", "blk.")
        _write_tensor(writer, writer_name, weight)
    finish(writer)


def _write_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * (len(CONTROLS) - 1)
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(tokenizer.pieces)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokenizer.texts())
    writer.add_token_scores(tokenizer.scores())
    writer.add_token_types(kinds)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(EOT)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    # No space is put in front of a text, so detokenizing returns it unchanged and it can be cut and continued anywhere.
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_tensor(writer: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    data = weight.detach().float().numpy().astype(np.float32)
    if data.ndim == 1:
        writer.add_tensor(name, data)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
