// Null pointers and divisions by zero as errors, by handlers of signals; Windows: system_windows.cpp.
#include "signals.hpp"

#include "faults.hpp"
#include "system.hpp"

#include <csetjmp>
#include <cstdint>
#include <cstdlib>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lp {

bool SignalWatch::begin() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (n_begun_ == 0) {
        struct sigaction action{};
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
    struct sigaction                  now{};
    // A handler that was installed meanwhile stays.
    if (--n_begun_ == 0 && sigaction(number_, nullptr, &now) == 0 && now.sa_sigaction == handler_) {
        sigaction(number_, &previous_, nullptr);
    }
}

void SignalWatch::forward(siginfo_t *info, void *context) const noexcept {
    if ((previous_.sa_flags & SA_SIGINFO) != 0 && previous_.sa_sigaction != nullptr) {
        previous_.sa_sigaction(number_, info, context);
    } else if (previous_.sa_handler != SIG_DFL && previous_.sa_handler != SIG_IGN) {
        previous_.sa_handler(number_);
    } else if (previous_.sa_handler != SIG_IGN || info->si_code > 0) {
        signal(number_, SIG_DFL);
        // A fault's instruction runs again and ends the process, as without this handler; a signal that was sent does not.
        if (info->si_code <= 0) {
            raise(number_);
        }
    }
}

}  // namespace lp

namespace {

struct Exit {
    sigjmp_buf buffer;
    Exit      *outer;
};

void on_fault(int number, siginfo_t *info, void *context);

lp::SignalWatch    g_null_pointers(SIGSEGV, on_fault), g_divisions(SIGFPE, on_fault);
thread_local Exit *t_exit = nullptr;
// The system maps nothing below this address. Faults elsewhere mean that memory was overwritten: those end the process.
constexpr uintptr_t kNullPageEnd = 65536;

// Where the thread was.
const void *instruction_of(const void *context) {
    const auto &machine = static_cast<const ucontext_t *>(context)->uc_mcontext;
#if defined(__linux__) && defined(__x86_64__)
    return reinterpret_cast<const void *>(machine.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
    return reinterpret_cast<const void *>(machine.pc);
#elif defined(__APPLE__) && defined(__x86_64__)
    return reinterpret_cast<const void *>(machine->__ss.__rip);
#elif defined(__APPLE__) && defined(__aarch64__)
    return reinterpret_cast<const void *>(__darwin_arm_thread_state64_get_pc(machine->__ss));
#else
    (void)machine;
    return nullptr;
#endif
}

void on_fault(int number, siginfo_t *info, void *context) {
    const bool is_null =
            number == SIGSEGV && reinterpret_cast<uintptr_t>(info->si_addr) < kNullPageEnd && info->si_code == SEGV_MAPERR;
    const bool is_division = number == SIGFPE && info->si_code == FPE_INTDIV;
    // In the allocator it is memory that was overwritten by zeros; its locks would stay locked, too.
    if (t_exit != nullptr && (is_null || is_division) && !lp::system::is_allocator(instruction_of(context))) {
        siglongjmp(t_exit->buffer, number);
    }
    (number == SIGSEGV ? g_null_pointers : g_divisions).forward(info, context);
}

// A thread's configuration of AMX's tiles. Linux takes it away when it calls a handler and gives it back when that returns, but
// ours jumps out, and ggml configures a thread's tiles only once: its next product there would end the process.
class TileConfig {
public:
#if defined(__linux__) && defined(__x86_64__)
    TileConfig() noexcept {
        constexpr int      kGetPermissions = 0x1022;  // ARCH_GET_XCOMP_PERM
        constexpr uint64_t kTileData       = 1 << 18;
        uint64_t           allowed         = 0;
        // Without permission no thread can have used tiles.
        if (syscall(SYS_arch_prctl, kGetPermissions, &allowed) == 0 && (allowed & kTileData) != 0) {
            __asm__ volatile("sttilecfg %0" : "=m"(bytes_));
        }
    }
    void restore() const noexcept {
        if (bytes_[0] != 0) {  // the palette; 0: no configuration
            __asm__ volatile("ldtilecfg %0" : : "m"(bytes_));
        }
    }

private:
    unsigned char bytes_[64] = {};
#else
    void restore() const noexcept {}
#endif
};

}  // namespace

namespace lp {

const char *run_until_fault(void (*work)(void *data), void *data) noexcept {
    const bool       watches_pointers = g_null_pointers.begin(), watches_divisions = g_divisions.begin();
    const TileConfig tiles;
    Exit             here;
    here.outer       = t_exit;
    const int number = sigsetjmp(here.buffer, 0);  // the handlers block no signal
    if (number == 0) {
        t_exit = &here;
        work(data);
    }
    t_exit = here.outer;
    if (number != 0) {
        tiles.restore();
    }
    if (watches_divisions) {
        g_divisions.end();
    }
    if (watches_pointers) {
        g_null_pointers.end();
    }
    return number == 0 ? nullptr : number == SIGFPE ? "divided by zero" : "read from a null pointer";
}

}  // namespace lp
