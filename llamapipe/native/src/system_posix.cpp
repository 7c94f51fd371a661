// Linux and macOS.
#include "system.hpp"

#include "ggml.h"
#include "mappings.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <pthread.h>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>

namespace lp::system {

void *open_library(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error(std::string("the library cannot be loaded: ") + dlerror());
    }
    return library;
}

void *find_function(void *library, const char *name) { return dlsym(library, name); }

void *library_of(const void *address) {
    Dl_info info = {};
    return dladdr(address, &info) != 0 ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
}

bool is_in_library(const void *address, const char *part) {
    Dl_info info;
    return dladdr(address, &info) != 0 && info.dli_fname != nullptr && strstr(info.dli_fname, part) != nullptr;
}

bool is_allocator(const void *address) {
    Dl_info mine, its;
    return dladdr(address, &mine) != 0 && dladdr(reinterpret_cast<const void *>(&malloc), &its) != 0 &&
           mine.dli_fbase == its.dli_fbase;
}

int call_stack(void **addresses, int n) {
    // Not backtrace(), which musl lacks.
    struct Stack {
        void **addresses;
        int    n, n_found;
    } stack         = { addresses, n, 0 };
    const auto note = [](_Unwind_Context *context, void *data) {
        auto &found = *static_cast<Stack *>(data);
        if (found.n_found == found.n) {
            return _URC_END_OF_STACK;
        }
        found.addresses[found.n_found++] = reinterpret_cast<void *>(_Unwind_GetIP(context));
        return _URC_NO_REASON;
    };
    _Unwind_Backtrace(note, &stack);
    return stack.n_found;
}

static size_t padded(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

void *reserve(size_t size, size_t alignment) {
    const size_t spare = alignment > page_bytes() ? alignment : 0;
    void        *found = mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        return nullptr;
    }
    if (spare) {
        const size_t begin = reinterpret_cast<size_t>(found), base = padded(begin, alignment);
        if (base > begin) {
            munmap(found, base - begin);
        }
        if (base < begin + spare) {
            munmap(reinterpret_cast<void *>(base + size), begin + spare - base);
        }
        found = reinterpret_cast<void *>(base);
    }
    return found;
}

void release(void *data, size_t size) { munmap(data, size); }

bool put_file(void *data, size_t size, int fd, int64_t offset) {
    // Elsewhere first: a mapping that fails may leave a hole in place of the memory.
    void *found = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, offset);
    if (found == MAP_FAILED) {
        return false;
    }
    munmap(found, size);
    if (mmap(data, size, PROT_READ, MAP_SHARED | MAP_FIXED, fd, offset) != data) {
        GGML_ABORT("a file cannot be mapped: %s", strerror(errno));
    }
#ifdef MADV_POPULATE_READ
    madvise(data, size, MADV_HUGEPAGE);  // if the file has to be read
    madvise(data, size, MADV_POPULATE_READ);
#endif
    return true;
}

void let_go(const void *data, size_t size) {
    const auto page = static_cast<uintptr_t>(page_bytes());
    Mapping    mapping;
    if (!find_mapping(reinterpret_cast<uintptr_t>(data), mapping) || mapping.is_writable || mapping.path[0] != '/') {
        return;  // a copy in memory, which would be lost
    }
    const uintptr_t begin = padded(reinterpret_cast<uintptr_t>(data), page),
                    end   = std::min(reinterpret_cast<uintptr_t>(data) + size, mapping.end) / page * page;
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
    }
}

namespace {
struct Job {
    void (*work)(void *);
    void *data;
};
void *run(void *job) {
    const Job &mine = *static_cast<Job *>(job);
    mine.work(mine.data);
    return nullptr;
}
}  // namespace

bool run_with_stack(size_t bytes, void (*work)(void *data), void *data) {
    // The stack is only reserved: pages that are not touched cost no memory.
    Job            job = { work, data };
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, bytes);
    pthread_t  thread;
    const bool started = pthread_create(&thread, &attributes, run, &job) == 0;
    pthread_attr_destroy(&attributes);
    if (started) {
        pthread_join(thread, nullptr);
    }
    return started;
}

void wake_reader(int fd) {
    if (write(fd, "", 1) < 0) {
        return;  // the pipe is full, so its reader has not seen an earlier byte yet and will wake anyway
    }
}

}  // namespace lp::system
