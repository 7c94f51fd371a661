// What our kernels need of ggml's CPU backend that its public interface does not have: one file for all bets on its inside.
//
// ggml asks the types in a list of its own, which are C++ objects, whether they compute an operation. The list has no public
// function, so it is found by its mangled name; the classes are ggml's, from the sources that it is built from. So this holds
// only while the numbers of the interface agree, and otherwise nothing is changed and ggml's kernels compute everything.
// design/ggml-cpu-add-extra.patch would give ggml a function for it, and end this file.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-cpu/traits.h"

#include <string>

namespace lp::kernels {

// Waits for all threads that compute the graph. Null before `offer` has succeeded.
extern void (*barrier)(ggml_threadpool *);

// Puts a buffer type at the head of the list that ggml asks: for weights of a load, and for operations of a graph. It stays
// until the process ends. Before the first model is loaded: llama.cpp copies the list once. Fills in `type.device`. Returns
// why the list could not be changed; empty if it was. May throw std::bad_alloc.
std::string offer(ggml_backend_buffer_type &type, ggml::cpu::extra_buffer_type &extra);

}  // namespace lp::kernels
