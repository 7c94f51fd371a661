// Copies staged rows from a device to host memory, ordered after the graph that writes them by events.
#pragma once

#include "native.h"

#include <vector>

namespace lp {

// One lane for each slot of the ring. Each lane has a backend instance of its own: so it has a queue of its own where the
// device has several, and in any case its own command memory. One thread may wait for a lane while another records into
// the next.
class RowCopier {
public:
    // Throws std::runtime_error where the device has no events.
    RowCopier(ggml_backend_t compute, int n_lanes);
    ~RowCopier();
    RowCopier(const RowCopier &) = delete;
    RowCopier & operator=(const RowCopier &) = delete;

    // After a launch, on the launching thread: copies run once the graph has. A lane must be idle.
    void begin(int lane);
    void copy(int lane, const ggml_tensor * from, int64_t first_row, int64_t n_rows, float * to);
    void end(int lane);

    // Return when the graph, and when the copies are done. One thread at a time for each lane.
    void wait_computed(int lane);
    void wait_copied(int lane);

private:
    struct Lane {
        ggml_backend_t       backend  = nullptr;
        ggml_backend_event_t launched = nullptr;  // recorded by the backend that computes
        ggml_backend_event_t computed = nullptr;  // the same moment, on this lane
        ggml_backend_event_t copied   = nullptr;
        bool                 used     = false;
    };
    void free_lanes();

    ggml_backend_t    compute_;
    std::vector<Lane> lanes_;
};

}  // namespace lp
