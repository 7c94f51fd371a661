// Copies staged rows from a device to host memory, ordered after the graph that writes them by events.
#include "row_copier.hpp"

#include <stdexcept>

namespace lp {

RowCopier::RowCopier(ggml_backend_t compute, int n_lanes) : compute_(compute), lanes_((size_t) n_lanes) {
    ggml_backend_dev_t device = ggml_backend_get_device(compute);
    for (Lane & lane : lanes_) {
        lane.backend  = ggml_backend_dev_init(device, nullptr);
        lane.launched = ggml_backend_event_new(device);
        lane.computed = ggml_backend_event_new(device);
        lane.copied   = ggml_backend_event_new(device);
        if (!lane.backend || !lane.launched || !lane.computed || !lane.copied) {
            free_lanes();
            throw std::runtime_error("the device has no events, or no memory for another queue");
        }
    }
}

RowCopier::~RowCopier() { free_lanes(); }

void RowCopier::free_lanes() {
    for (Lane & lane : lanes_) {
        if (lane.backend) {
            ggml_backend_synchronize(lane.backend);
        }
        for (ggml_backend_event_t event : { lane.launched, lane.computed, lane.copied }) {
            if (event) {
                ggml_backend_event_free(event);
            }
        }
        if (lane.backend) {
            ggml_backend_free(lane.backend);
        }
    }
    lanes_.clear();
}

void RowCopier::begin(int i) {
    Lane & lane = lanes_[(size_t) i];
    if (lane.used) {
        // The event is long past, so this returns at once. Some backends keep an event's memory until it is waited for.
        ggml_backend_event_synchronize(lane.launched);
    }
    lane.used = true;
    ggml_backend_event_record(lane.launched, compute_);
    ggml_backend_event_wait(lane.backend, lane.launched);
    ggml_backend_event_record(lane.computed, lane.backend);
}

void RowCopier::copy(int i, const ggml_tensor * from, int64_t first_row, int64_t n_rows, float * to) {
    const size_t row = (size_t) from->nb[1];
    ggml_backend_tensor_get_async(lanes_[(size_t) i].backend, from, to, (size_t) first_row * row, (size_t) n_rows * row);
}

void RowCopier::end(int i) { ggml_backend_event_record(lanes_[(size_t) i].copied, lanes_[(size_t) i].backend); }

void RowCopier::wait_computed(int i) { ggml_backend_event_synchronize(lanes_[(size_t) i].computed); }

void RowCopier::wait_copied(int i) { ggml_backend_event_synchronize(lanes_[(size_t) i].copied); }

}  // namespace lp
