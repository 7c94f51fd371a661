// What is mapped where in this process.
#pragma once

#include <climits>
#include <cstdint>

namespace lp {

struct Mapping {
    uintptr_t begin = 0, end = 0;
    bool      is_writable = false;
    char      path[PATH_MAX];  // empty if it has no file
};

// Finds the mapping that contains an address; false where the system does not tell. Only async-signal-safe calls.
bool find_mapping(uintptr_t address, Mapping &found);

}  // namespace lp
