// Numbers that end where a page begins that cannot be read or written.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace lp::kernels {

template <typename T> class Guarded {
public:
    explicit Guarded(int64_t n) : n_(n) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)),
                     used = (static_cast<size_t>(n) * sizeof(T) + page - 1) / page * page;
        size_             = used + page;
        base_             = static_cast<char *>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(base_ + used, page, PROT_NONE);
        at_ = reinterpret_cast<T *>(base_ + used) - n;
    }
    ~Guarded() { munmap(base_, size_); }
    Guarded(const Guarded &)            = delete;
    Guarded &operator=(const Guarded &) = delete;

    T      *operator+(int64_t i) const { return at_ + i; }
    T      &operator[](int64_t i) const { return at_[i]; }
    T      *begin() const { return at_; }
    T      *end() const { return at_ + n_; }
    int64_t size() const { return n_; }

private:
    int64_t n_;
    size_t  size_;
    char   *base_;
    T      *at_;
};

}  // namespace lp::kernels
