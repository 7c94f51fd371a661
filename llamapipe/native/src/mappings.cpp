
#include "mappings.hpp"

#include "native.h"
#include "signals.hpp"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace lp {

bool find_mapping(uintptr_t address, Mapping &found) {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) {
        return false;
    }
    // A line: "begin-end rights offset device inode   /path". Fields 0 to 4 are numbers or letters without spaces.
    char      buffer[4096];
    ssize_t   n_read = 0;
    uintptr_t begin = 0, end = 0;
    int       field     = 0;
    size_t    n_path    = 0;
    bool      is_second = false, is_space = false, is_found = false;
    found.is_writable = false;
    while (!is_found && (n_read = read(maps, buffer, sizeof buffer)) > 0) {
        for (ssize_t i = 0; i < n_read && !is_found; i++) {
            const char c = buffer[i];
            if (c == '\n') {
                if (begin <= address && address < end) {
                    found.begin        = begin;
                    found.end          = end;
                    found.path[n_path] = 0;
                    is_found           = true;
                    break;
                }
                begin = end = 0;
                field       = 0;
                n_path      = 0;
                is_second = is_space = found.is_writable = false;
            } else if (field < 5 && c == ' ') {
                is_space = true;
            } else {
                if (is_space) {
                    is_space = false;
                    field++;
                }
                if (field == 0 && c == '-') {
                    is_second = true;
                } else if (field == 0) {
                    uintptr_t &number = is_second ? end : begin;
                    number            = number * 16 + static_cast<uintptr_t>(c <= '9' ? c - '0' : c - 'a' + 10);
                } else if (field == 1 && c == 'w') {
                    found.is_writable = true;
                } else if (field == 5 && n_path + 1 < sizeof found.path) {
                    found.path[n_path++] = c;
                }
            }
        }
    }
    close(maps);
    return is_found;
}

}  // namespace lp

// Files that shrink while they are mapped: reading a page beyond the new end raises SIGBUS, which would end the process.
// While a thread loads a model, such pages are replaced by zeros, and the load is refused afterwards. ggml converts
// weights in threads of its own (AMX): for these, the page must belong to a file that is being loaded.
namespace {

void on_missing_page(int number, siginfo_t *info, void *context);

uintptr_t        g_page_size = 4096;
lp::SignalWatch  g_watch(SIGBUS, on_missing_page);
thread_local int t_n_guards = 0, t_n_missing = 0;

// A file that is being loaded. The handler reads these without a lock.
struct File {
    std::atomic<bool> used{ false };
    std::atomic<int>  n_missing{ 0 };
    const int        *thread = nullptr;  // whose guard it belongs to, and how many guards that thread had
    int               depth  = 0;
    char              path[PATH_MAX];
};

std::mutex g_mutex;  // of those who write
File       g_files[64];

bool map_zeros(uintptr_t begin, size_t size) {
    void *const at = reinterpret_cast<void *>(begin);
    return mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at;
}

// Replaces the rest of the mapping of a file that is being loaded: what follows a missing page is missing, too.
bool replace_rest(uintptr_t page) {
    lp::Mapping mapping;
    if (!lp::find_mapping(page, mapping)) {
        return false;
    }
    const char *path      = mapping.path;
    bool        is_loaded = false;
    for (File &file : g_files) {
        if (path[0] == 0 && file.used) {
            return true;  // another thread has replaced the page meanwhile
        }
        if (file.used && strcmp(file.path, path) == 0) {
            file.n_missing++;
            is_loaded = true;
        }
    }
    return is_loaded && map_zeros(page, mapping.end - page);
}

void on_missing_page(int, siginfo_t *info, void *context) {
    if (info->si_code == BUS_ADRERR) {
        const uintptr_t page = reinterpret_cast<uintptr_t>(info->si_addr) & ~(g_page_size - 1);
        if (t_n_guards > 0) {
            if (map_zeros(page, g_page_size)) {
                t_n_missing++;
                return;  // the instruction runs again and reads zeros
            }
        } else if (replace_rest(page)) {
            return;
        }
    }
    g_watch.forward(info, context);
}

void add(const char *path) {
    const size_t n = strlen(path);
    for (File &file : g_files) {
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

int lp_mapping_guard_begin(const char *const *paths, int n_paths) {
    g_page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
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
        for (File &file : g_files) {
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
