// Failed assertions of llama.cpp and ggml as exceptions.
#pragma once

namespace lp {

void watch_assertions() noexcept;

// While one lives, a failed assertion on this thread throws instead of ending the process. Only where what was begun is not
// used afterwards: loading a model, creating a context. Not while a graph is computed: its other threads would wait for ever.
class AssertionsThrow {
public:
    AssertionsThrow() noexcept;
    ~AssertionsThrow();
    AssertionsThrow(const AssertionsThrow &)             = delete;
    AssertionsThrow & operator=(const AssertionsThrow &) = delete;
};

// The same while a graph is built and computed, but for what a backend finds: its other threads would wait for ever.
class DecodeAssertionsThrow {
public:
    DecodeAssertionsThrow() noexcept;
    ~DecodeAssertionsThrow();
    bool happened() const noexcept;  // since it was made: what computes the graph is left half changed
    DecodeAssertionsThrow(const DecodeAssertionsThrow &)             = delete;
    DecodeAssertionsThrow & operator=(const DecodeAssertionsThrow &) = delete;
};

}  // namespace lp
