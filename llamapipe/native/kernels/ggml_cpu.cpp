#include "ggml_cpu.hpp"

#include "system.hpp"

#include <vector>

// What ggml's traits.cpp defines. ggml calls the destructors and vtables through our objects and asks for no type information,
// and its library, opened with RTLD_LOCAL, needs no link: so they are compiled here again, hidden.
namespace ggml::cpu {
tensor_traits::~tensor_traits() {}
extra_buffer_type::~extra_buffer_type() {}
}  // namespace ggml::cpu

namespace lp::kernels {

namespace {

// Of ggml's backends. Before it is increased: read again what traits.h and traits.cpp declare, when ggml-cpu.cpp copies the
// list, and what supports_op of its device asks of a buffer type's context.
constexpr int kKnownInterface = 3;

// std::vector<ggml_backend_buffer_type_t> & ggml_backend_cpu_get_extra_buffer_types(), in the Itanium ABI.
constexpr const char *kTypes = "_Z39ggml_backend_cpu_get_extra_buffer_typesv";
using Types                  = std::vector<ggml_backend_buffer_type_t> &(*)();

// The first function is public and says which library the others are in: the variant of the backend that ggml has loaded.
using Listed = ggml_backend_dev_get_extra_bufts_t;

}  // namespace

void (*barrier)(ggml_threadpool *) = nullptr;

std::string offer(ggml_backend_buffer_type &type, ggml::cpu::extra_buffer_type &extra) {
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : nullptr;
    if (!reg) {
        return "there is no CPU backend";
    }
    if (GGML_BACKEND_API_VERSION != kKnownInterface || reg->api_version != kKnownInterface) {
        return "they know version " + std::to_string(kKnownInterface) + " of the interface of ggml's backends, not version " +
               std::to_string(reg->api_version);
    }
    const auto listed  = reinterpret_cast<Listed>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
    void      *library = listed ? lp::system::library_of(reinterpret_cast<void *>(listed)) : nullptr;  // kept open
    const auto find    = [&](const char *name) { return library ? lp::system::find_function(library, name) : nullptr; };
    const auto types   = reinterpret_cast<Types>(find(kTypes));
    barrier            = reinterpret_cast<decltype(barrier)>(find("ggml_barrier"));
    if (!types || !barrier) {
        return "ggml's CPU backend has no list of buffer types";
    }
    type.device  = cpu;
    type.context = &extra;
    types().insert(types().begin(), &type);
    if (listed(cpu)[0] != &type) {  // ggml copies the list when it is first asked for it
        types().erase(types().begin());
        return "ggml's list of buffer types is in use already";
    }
    return "";
}

}  // namespace lp::kernels
