// Files that shrink while they are mapped: reading a page beyond the new end raises SIGBUS, which would end the process.
// While a thread loads a model, such pages are replaced by zeros, and the load is refused afterwards.
#include "native.h"
#include "signal_watch.hpp"

#include <sys/mman.h>
#include <unistd.h>

namespace {

void on_missing_page(int number, siginfo_t * info, void * context);

uintptr_t        g_page_size = 4096;
lp::SignalWatch  g_watch(SIGBUS, on_missing_page);
thread_local int t_n_guards = 0, t_n_missing = 0;

void on_missing_page(int, siginfo_t * info, void * context) {
    if (t_n_guards > 0 && info->si_code == BUS_ADRERR) {
        void * page = (void *) ((uintptr_t) info->si_addr & ~(g_page_size - 1));
        if (mmap(page, g_page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page) {
            t_n_missing++;
            return;  // the instruction runs again and reads zeros
        }
    }
    g_watch.forward(info, context);
}

}  // namespace

int lp_mapping_guard_begin(void) {
    g_page_size = (uintptr_t) sysconf(_SC_PAGESIZE);
    if (!g_watch.begin()) {
        return LP_ERROR;
    }
    if (t_n_guards++ == 0) {
        t_n_missing = 0;
    }
    return 0;
}

int lp_mapping_guard_end(void) {
    t_n_guards--;
    g_watch.end();
    return t_n_missing;
}
