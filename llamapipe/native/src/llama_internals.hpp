// The backend that computes a context's graphs on a device.
#pragma once

#include "native.h"

namespace lp {

ggml_backend_t compute_backend(llama_context * ctx, ggml_backend_dev_t device);  // null when there is none

size_t scratch_bytes(llama_context * ctx);  // of the buffers that graphs are computed in, on all devices

}  // namespace lp
