// What operating systems do in different ways: libraries, memory and files in it, stacks, waking a reader.
//
// Everything else in native code is standard C++, or has a fallback beside it. system_posix.cpp and system_windows.cpp are
// the two implementations; CMakeLists.txt chooses. Signals, which Windows lacks, are in signals.cpp, and what stands for
// them there in system_windows.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace lp::system {

// ---- libraries. They stay loaded.
void *open_library(const char *path);                         // throws std::runtime_error; `path` is UTF-8
void *find_function(void *library, const char *name);        // null: it has none
void *library_of(const void *address);                        // null: no library has it
bool  is_in_library(const void *address, const char *part);  // whether the library's path contains `part`
bool  is_allocator(const void *address);                      // whether the library of malloc has it
int   call_stack(void **addresses, int n);                    // of this thread, innermost first; how many

// ---- memory
// Zeros, for reading and writing, which take memory when they are touched. `alignment`: of the start, a power of two of pages;
// smaller than a page: any. Null if there is none.
void *reserve(size_t size, size_t alignment);
void  release(void *data, size_t size);  // what `reserve` returned
// Replaces reserved memory by a part of a file, to be read only. False, with nothing changed, if that is not possible.
bool put_file(void *data, size_t size, int fd, int64_t offset);
// Lets go of pages of a mapped file that were read; they can be read again. Nothing happens to other memory.
void let_go(const void *data, size_t size);

// ---- threads
// Calls work(data) on a thread with a stack of so many bytes, and waits for it. False if it could not be started.
bool run_with_stack(size_t bytes, void (*work)(void *data), void *data);

// Writes a byte into a pipe, which does not block, for its reader to wake.
void wake_reader(int fd);

// ---- environment
// Whether a variable switches something on: it is set, and neither empty nor 0.
inline bool is_switched_on(const char *variable) {
    const char *value = getenv(variable);
    return value != nullptr && *value != '\0' && strcmp(value, "0") != 0;
}

}  // namespace lp::system
