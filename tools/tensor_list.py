"""Ask llama.cpp which tensors a model of given metadata has: their names and shapes, for any architecture.

``llama_model_init_from_user`` (llama.h) makes a model from metadata alone and calls back for each of its tensors. It
reserves the memory of all of them as float32 and nobody touches it: the address space is needed, the memory is not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import cffi
import gguf

from llamapipe.native.load import LIB_DIR, drain_log, native

# The structures' sizes come from the native module; a model's parameters are passed by value, as words.
_CDEF = """
struct params {{ int64_t words[{n_words}]; }};
struct gguf_init_params {{ bool no_alloc; void ** ctx; }};
struct ggml_tensor {{ int type; void * buffer; int64_t ne[4]; ...; }};
void * gguf_init_from_file(const char * fname, struct gguf_init_params params);
void gguf_free(void * ctx);
const char * ggml_get_name(const struct ggml_tensor * tensor);
void * llama_model_init_from_user(
    void * metadata, void (*set)(struct ggml_tensor *, void *), void * userdata, struct params params);
"""

Dims = tuple[int, ...]  # as ggml counts them: the length of a row first


def _text(ffi: cffi.FFI, text: Any) -> str:
    string = ffi.string(text)
    return string.decode() if isinstance(string, bytes) else string


def tensors_of(writer: gguf.GGUFWriter, architecture: str) -> list[tuple[str, Dims]]:
    """Names and shapes of all tensors that llama.cpp would read, optional ones included, each once.

    ``writer``: has the metadata and writes it to a file of its own here. Raises ValueError if llama.cpp refuses it.
    """
    module = native()
    n_bytes = module.ffi.sizeof("struct llama_model_params")
    ffi = cffi.FFI()
    ffi.cdef(_CDEF.format(n_words=n_bytes // 8).replace(" ...; }", " }"))
    dims_of: dict[str, Dims] = {}

    @ffi.callback("void(struct ggml_tensor *, void *)")
    def see(tensor: Any, _: Any) -> None:
        dims = list(tensor.ne)
        while len(dims) > 1 and dims[-1] == 1:
            dims.pop()
        dims_of.setdefault(_text(ffi, ggml.ggml_get_name(tensor)), tuple(dims))

    ggml: Any = ffi.dlopen(str(LIB_DIR / "libllamapipe-ggml-base.so.0"))
    llama: Any = ffi.dlopen(str(LIB_DIR / "libllamapipe-llama.so.0"))
    defaults = module.ffi.new("struct llama_model_params *", module.lib.llama_model_default_params())
    defaults.n_gpu_layers = 0
    defaults.load_mtp = True
    params = ffi.new("struct params *")
    ffi.memmove(params, module.ffi.buffer(defaults), n_bytes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metadata.gguf"
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.close()
        read = ffi.new("struct gguf_init_params *", {"no_alloc": True})
        metadata = ggml.gguf_init_from_file(str(path).encode(), read[0])
    drain_log(module)
    model = llama.llama_model_init_from_user(metadata, see, ffi.NULL, params[0])
    ggml.gguf_free(metadata)
    if model == ffi.NULL:
        reason = "; ".join(drain_log(module)[-3:])
        raise ValueError(f"llama.cpp cannot make a {architecture} of these sizes: {reason}")
    module.lib.llama_model_free(module.ffi.cast("struct llama_model *", int(ffi.cast("intptr_t", model))))
    drain_log(module)
    return list(dims_of.items())
