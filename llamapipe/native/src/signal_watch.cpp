#include "signal_watch.hpp"

namespace lp {

bool SignalWatch::begin() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (n_begun_ == 0) {
        struct sigaction action {};
        action.sa_sigaction = handler_;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        // The old handler must be known before the new one can run.
        if (sigaction(number_, nullptr, &previous_) != 0 || sigaction(number_, &action, nullptr) != 0) {
            return false;
        }
    }
    n_begun_++;
    return true;
}

void SignalWatch::end() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    struct sigaction now {};
    // A handler that was installed meanwhile stays.
    if (--n_begun_ == 0 && sigaction(number_, nullptr, &now) == 0 && now.sa_sigaction == handler_) {
        sigaction(number_, &previous_, nullptr);
    }
}

void SignalWatch::forward(siginfo_t * info, void * context) const noexcept {
    if ((previous_.sa_flags & SA_SIGINFO) != 0 && previous_.sa_sigaction != nullptr) {
        previous_.sa_sigaction(number_, info, context);
    } else if (previous_.sa_handler != SIG_DFL && previous_.sa_handler != SIG_IGN) {
        previous_.sa_handler(number_);
    } else {
        signal(number_, SIG_DFL);  // the instruction runs again and ends the process, as without this handler
    }
}

}  // namespace lp
