// LoRAs: loading and freeing them.
#include "adapters.hpp"

#include "faults.hpp"

std::mutex &lp::adapters_mutex() {
    static std::mutex mutex;
    return mutex;
}

llama_adapter_lora *lp_adapter_load(llama_model *model, const char *path) {
    lp::set_error("llama.cpp refused the file");
    return lp::guard(nullptr, [&] {
        const std::lock_guard<std::mutex> lock(lp::adapters_mutex());
        const lp::AssertionsThrow         throwing;
        return lp::without_faults(nullptr, [&] { return llama_adapter_lora_init(model, path); });
    });
}

void lp_adapter_free(llama_adapter_lora *adapter) {
    lp::guard(0, [&] {
        const std::lock_guard<std::mutex> lock(lp::adapters_mutex());
        llama_adapter_lora_free(adapter);
        return 0;
    });
}
