// Files that shrink while they are mapped: reading a page beyond the new end raises SIGBUS, which would end the process.
// While a thread loads a model, such pages are replaced by zeros, and the load is refused afterwards. ggml converts
// weights in threads of its own (AMX): for these, the page must belong to a file that is being loaded.
#include "mappings.hpp"
#include "native.h"
#include "signal_watch.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <mutex>

namespace {

void on_missing_page(int number, siginfo_t * info, void * context);

uintptr_t        g_page_size = 4096;
lp::SignalWatch  g_watch(SIGBUS, on_missing_page);
thread_local int t_n_guards = 0, t_n_missing = 0;

// A file that is being loaded. The handler reads these without a lock.
struct File {
    std::atomic<bool> used{false};
    std::atomic<int>  n_missing{0};
    const int *       thread = nullptr;  // whose guard it belongs to, and how many guards that thread had
    int               depth  = 0;
    char              path[PATH_MAX];
};

std::mutex g_mutex;  // of those who write
File       g_files[64];

// Replaces the rest of the mapping of a file that is being loaded: what follows a missing page is missing, too.
bool replace_rest(uintptr_t page) {
    lp::Mapping mapping;
    if (!lp::find_mapping(page, mapping)) {
        return false;
    }
    const char * path = mapping.path;
    bool is_loaded = false;
    for (File & file : g_files) {
        if (path[0] == 0 && file.used) {
            return true;  // another thread has replaced the page meanwhile
        }
        if (file.used && strcmp(file.path, path) == 0) {
            file.n_missing++;
            is_loaded = true;
        }
    }
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return is_loaded && mmap((void *) page, mapping.end - page, PROT_READ | PROT_WRITE, flags, -1, 0) == (void *) page;
}

void on_missing_page(int, siginfo_t * info, void * context) {
    if (info->si_code == BUS_ADRERR) {
        const uintptr_t page = (uintptr_t) info->si_addr & ~(g_page_size - 1);
        if (t_n_guards > 0) {
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
            if (mmap((void *) page, g_page_size, PROT_READ | PROT_WRITE, flags, -1, 0) == (void *) page) {
                t_n_missing++;
                return;  // the instruction runs again and reads zeros
            }
        } else if (replace_rest(page)) {
            return;
        }
    }
    g_watch.forward(info, context);
}

void add(const char * path) {
    const size_t n = strlen(path);
    for (File & file : g_files) {
        if (!file.used && n < sizeof file.path) {
            memcpy(file.path, path, n + 1);
            file.thread    = &t_n_guards;
            file.depth     = t_n_guards;
            file.n_missing = 0;
            file.used      = true;
            return;
        }
    }
}

}  // namespace

int lp_mapping_guard_begin(const char * const * paths, int n_paths) {
    g_page_size = (uintptr_t) sysconf(_SC_PAGESIZE);
    if (!g_watch.begin()) {
        return LP_ERROR;
    }
    if (t_n_guards++ == 0) {
        t_n_missing = 0;
    }
    std::lock_guard lock(g_mutex);
    std::for_each(paths, paths + n_paths, add);
    return 0;
}

int lp_mapping_guard_end(void) {
    int n_missing = 0;
    {
        std::lock_guard lock(g_mutex);
        for (File & file : g_files) {
            if (file.used && file.thread == &t_n_guards && file.depth == t_n_guards) {
                file.used = false;
                n_missing += file.n_missing;
            }
        }
    }
    t_n_guards--;
    g_watch.end();
    return t_n_missing + n_missing;
}
