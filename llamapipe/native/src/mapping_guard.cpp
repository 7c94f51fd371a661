// Files that shrink while they are mapped: reading a page beyond the new end raises SIGBUS, which would end the process.
// While a thread loads a model, such pages are replaced by zeros, and the load is refused afterwards.
#include "native.h"

#include <csignal>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace {

std::mutex              g_mutex;
int                     g_n_guards = 0;  // under g_mutex
struct sigaction        g_previous {};   // written under g_mutex before the handler is installed
uintptr_t               g_page_size = 4096;
thread_local int        t_n_guards  = 0;
thread_local int        t_n_missing = 0;

void on_missing_page(int number, siginfo_t * info, void * context) {
    if (t_n_guards > 0 && info->si_code == BUS_ADRERR) {
        void * page = (void *) ((uintptr_t) info->si_addr & ~(g_page_size - 1));
        if (mmap(page, g_page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page) {
            t_n_missing++;
            return;  // the instruction runs again and reads zeros
        }
    }
    if ((g_previous.sa_flags & SA_SIGINFO) != 0 && g_previous.sa_sigaction != nullptr) {
        g_previous.sa_sigaction(number, info, context);
    } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
        g_previous.sa_handler(number);
    } else {
        signal(number, SIG_DFL);  // the instruction runs again and ends the process, as without this handler
    }
}

}  // namespace

int lp_mapping_guard_begin(void) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    if (g_n_guards == 0) {
        g_page_size = (uintptr_t) sysconf(_SC_PAGESIZE);
        struct sigaction action {};
        action.sa_sigaction = on_missing_page;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        // The old handler must be known before the new one can run.
        if (sigaction(SIGBUS, nullptr, &g_previous) != 0 || sigaction(SIGBUS, &action, nullptr) != 0) {
            return LP_ERROR;
        }
    }
    g_n_guards++;
    if (t_n_guards++ == 0) {
        t_n_missing = 0;
    }
    return 0;
}

int lp_mapping_guard_end(void) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    t_n_guards--;
    if (--g_n_guards == 0) {
        struct sigaction now {};
        // A handler that was installed meanwhile stays.
        if (sigaction(SIGBUS, nullptr, &now) == 0 && now.sa_sigaction == on_missing_page) {
            sigaction(SIGBUS, &g_previous, nullptr);
        }
    }
    return t_n_missing;
}
