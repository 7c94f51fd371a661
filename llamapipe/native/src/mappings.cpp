#include "mappings.hpp"

#include <fcntl.h>
#include <unistd.h>

namespace lp {

bool find_mapping(uintptr_t address, Mapping & found) {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) {
        return false;
    }
    // A line: "begin-end rights offset device inode   /path". Fields 0 to 4 are numbers or letters without spaces.
    char      buffer[4096];
    ssize_t   n_read = 0;
    uintptr_t begin = 0, end = 0;
    int       field = 0;
    size_t    n_path = 0;
    bool      is_second = false, is_space = false, is_found = false;
    found.is_writable   = false;
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
                    uintptr_t & number = is_second ? end : begin;
                    number             = number * 16 + (uintptr_t) (c <= '9' ? c - '0' : c - 'a' + 10);
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
