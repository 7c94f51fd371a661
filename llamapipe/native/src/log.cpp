// The calling thread's error text, and the ring that holds native log records until Python drains them.
//
// llama_log_set is process-wide, and its callback may run on any thread, also while Python shuts down. So the callback only
// copies into fixed memory and never enters Python.
#include "faults.hpp"
#include "native.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace {

constexpr int kRecords     = 256;
constexpr int kRecordBytes = 512;

struct Record {
    int  level;
    int  n;
    char text[kRecordBytes];
};

struct Ring {
    std::mutex mutex;
    Record     records[kRecords];
    uint64_t   n_written = 0;
    uint64_t   n_read    = 0;
    uint64_t   n_dropped = 0;
    bool       skipping  = false;  // the last record was dropped, and so are its continuations
};

Ring &the_ring() {
    static Ring *r = new Ring;  // never freed: records may arrive during static destruction
    return *r;
}

void on_log(ggml_log_level level, const char *text, void *) {
    Ring                             &r = the_ring();
    const std::lock_guard<std::mutex> lock(r.mutex);
    // ggml writes hundreds of debug lines for a context: they would push out the records that matter.
    r.skipping = level == GGML_LOG_LEVEL_DEBUG || (level == GGML_LOG_LEVEL_CONT && r.skipping);
    if (r.skipping) {
        return;
    }
    if (r.n_written - r.n_read == kRecords) {
        r.n_read++;
        r.n_dropped++;
    }
    Record &out = r.records[r.n_written++ % kRecords];
    out.level   = level;
    out.n       = static_cast<int>(std::min(strlen(text), static_cast<size_t>(kRecordBytes)));
    memcpy(out.text, text, out.n);
}

thread_local char last_error[512] = "";

}  // namespace

void lp::set_error(const char *text) noexcept { strncpy(last_error, text, sizeof last_error - 1); }

const char *lp_last_error(void) { return last_error; }

void lp_log_start(void) {
    the_ring();
    llama_log_set(on_log, nullptr);  // also sets ggml's
}

int lp_log_next(char *text, int n_bytes, int *level) {
    Ring                             &r = the_ring();
    const std::lock_guard<std::mutex> lock(r.mutex);
    if (r.n_read == r.n_written) {
        return -1;
    }
    const Record &in = r.records[r.n_read++ % kRecords];
    const int     n  = std::min(in.n, n_bytes);
    memcpy(text, in.text, n);
    *level = in.level;
    return n;
}

#ifdef LP_TESTING
uint64_t lp_log_dropped(void) {
    Ring                             &r = the_ring();
    const std::lock_guard<std::mutex> lock(r.mutex);
    return r.n_dropped;
}
#endif
