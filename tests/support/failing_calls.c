/* Preloaded into a process: lets the n-th allocation or start of a thread fail, counted from when it is armed.
 *
 * Allocations count only if they are called from llama.cpp, ggml, llamapipe's module or the C++ library, so that the
 * interpreter's own are left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void * __libc_malloc(size_t);
extern void * __libc_calloc(size_t, size_t);
extern void * __libc_realloc(void *, size_t);
extern void * __libc_memalign(size_t, size_t);

enum kind { NONE, MALLOC, THREAD };

static struct { uintptr_t begin, end; } ranges[64];
static int         n_ranges;
static atomic_int  armed;
static atomic_long n_calls, first, last;

static int note_range(struct dl_phdr_info * info, size_t size, void * data) {
    (void) size, (void) data;
    const char * name = info->dlpi_name;
    if (!strstr(name, "llama") && !strstr(name, "ggml") && !strstr(name, "libstdc++") && !strstr(name, "_native")) {
        return 0;
    }
    for (int i = 0; i < info->dlpi_phnum && n_ranges < 64; i++) {
        if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X) {
            ranges[n_ranges].begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            ranges[n_ranges++].end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
        }
    }
    return 0;
}

/* Calls first_call to last_call of this kind will fail, counted from 1. */
void fail_calls(int kind, long first_call, long last_call) {
    if (n_ranges == 0) {
        dl_iterate_phdr(note_range, NULL);
    }
    n_calls = 0, first = first_call, last = last_call;
    armed = kind;
}

/* Ends it; the number of calls since it was armed. */
long calls_made(void) {
    armed = NONE;
    return n_calls;
}

static int fails(void) {
    const long n = ++n_calls;
    return n >= first && n <= last;
}

static int allocation_fails(const void * caller) {
    if (armed != MALLOC) {
        return 0;
    }
    for (int i = 0; i < n_ranges; i++) {
        if ((uintptr_t) caller >= ranges[i].begin && (uintptr_t) caller < ranges[i].end) {
            return fails();
        }
    }
    return 0;
}

#define FAIL_OR(call) return allocation_fails(__builtin_return_address(0)) ? (errno = ENOMEM, NULL) : (call)

void * malloc(size_t size) { FAIL_OR(__libc_malloc(size)); }
void * calloc(size_t n, size_t size) { FAIL_OR(__libc_calloc(n, size)); }
void * realloc(void * old, size_t size) { FAIL_OR(__libc_realloc(old, size)); }
void * aligned_alloc(size_t alignment, size_t size) { FAIL_OR(__libc_memalign(alignment, size)); }

int posix_memalign(void ** out, size_t alignment, size_t size) {
    if (allocation_fails(__builtin_return_address(0))) {
        return ENOMEM;
    }
    *out = __libc_memalign(alignment, size);
    return *out ? 0 : ENOMEM;
}

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * data) {
    static int (*real)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *);
    if (!real) {
        *(void **) &real = dlsym(RTLD_NEXT, "pthread_create");
    }
    return armed == THREAD && fails() ? EAGAIN : real(thread, attributes, run, data);
}
