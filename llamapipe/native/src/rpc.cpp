// Devices of other machines, through llama.cpp's ggml-rpc. Its library is opened by the first call here.
#include "faults.hpp"
#include "ggml-rpc.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

struct lp_rpc {
    ggml_backend_reg_t reg;
    ggml_backend_t     backend;  // keeps the connection: ggml-rpc closes it with the last object that uses it
};

namespace {

using add_server  = decltype(&ggml_backend_rpc_add_server);
using StartServer = decltype(&ggml_backend_rpc_start_server);

ggml_backend_reg_t open_library(const char *path) {
    static std::mutex         mutex;
    static ggml_backend_reg_t reg = nullptr;
    const std::lock_guard     lock(mutex);
    if (reg == nullptr && (reg = ggml_backend_load(path)) == nullptr) {
        throw std::runtime_error(std::string("the library ") + path + " cannot be loaded");
    }
    return reg;
}

template <typename Function> Function function(const char *library, const char *name) {
    auto *const found = reinterpret_cast<Function>(ggml_backend_reg_get_proc_address(open_library(library), name));
    if (found == nullptr) {
        throw std::runtime_error(std::string("ggml-rpc has no function ") + name);
    }
    return found;
}

}  // namespace

lp_rpc *lp_rpc_connect(const char *library, const char *address) {
    return lp::guard(nullptr, [&]() -> lp_rpc * {
        // Connecting fails by an assertion on this thread. Later failures are on a thread of ggml-rpc, and end the process.
        const lp::AssertionsThrow throwing;
        // The devices are not registered: llama.cpp would place layers of every model on registered ones, and each listing of
        // devices would connect to their workers, and end the process where one is gone.
        ggml_backend_reg_t reg = function<add_server>(library, "ggml_backend_rpc_add_server")(address);
        if (reg == nullptr || ggml_backend_reg_dev_count(reg) == 0) {
            throw std::runtime_error("the worker has no device");
        }
        ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr);
        if (backend == nullptr) {
            throw std::runtime_error("ggml-rpc could not open the worker's device");
        }
        return new lp_rpc{ reg, backend };
    });
}

void lp_rpc_disconnect(lp_rpc *rpc) {
    if (rpc != nullptr) {
        ggml_backend_free(rpc->backend);
        delete rpc;
    }
}

int lp_rpc_devices(const lp_rpc *rpc, int n_max, ggml_backend_dev_t *devices) {
    const int n = static_cast<int>(ggml_backend_reg_dev_count(rpc->reg));
    for (int i = 0; i < std::min(n, n_max); i++) {
        devices[i] = ggml_backend_reg_dev_get(rpc->reg, i);
    }
    return n;
}

int lp_rpc_serve(const char *library, const char *address, const char *cache, int n_threads, int n_devices,
                 ggml_backend_dev_t *devices) {
    return lp::guard(LP_ERROR, [&]() -> int {
        const auto serve = function<StartServer>(library, "ggml_backend_rpc_start_server");
        serve(address, cache, n_threads, n_devices, devices);
        lp::set_error("ggml-rpc stopped listening");
        return LP_ERROR;
    });
}
