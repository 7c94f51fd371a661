// Handlers of signals that are installed while they are needed, and pass on what is not their own. Not on Windows.
#pragma once

#include <csignal>
#include <mutex>

namespace lp {

// One for each signal, for ever. `handler` may call forward().
class SignalWatch {
public:
    using Handler = void (*)(int, siginfo_t *, void *);

    constexpr SignalWatch(int number, Handler handler) noexcept : number_(number), handler_(handler) {}

    bool begin() noexcept;  // false if the system refuses
    void end() noexcept;    // once for each begin() that succeeded
    void forward(siginfo_t *info, void *context) const noexcept;  // to the handler that was there before

private:
    const int        number_;
    const Handler    handler_;
    std::mutex       mutex_;
    int              n_begun_ = 0;   // under mutex_
    struct sigaction previous_{};   // written under mutex_ before the handler is installed
};

}  // namespace lp
