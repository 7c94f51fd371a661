// Loading LoRAs while contexts of the same model compute.
//
// A model has a list of its adapters. A context reads it when it reserves its graphs: when it is made, and in the first decode
// after a change of what it computes with. llama.cpp has no lock for that list, so here is one.
#pragma once

#include <mutex>

namespace lp {

std::mutex &adapters_mutex();

}  // namespace lp
