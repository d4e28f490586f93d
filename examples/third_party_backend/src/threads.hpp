// Loops whose rounds do not depend on one another.
#pragma once

#include <cstdint>

// body(i) for all i < n. With one thread OpenMP is left alone: even then it takes half a microsecond.
template <class Body>
inline void for_each(int64_t n, int64_t threads, const Body& body) {
    if (threads <= 1) {
        for (int64_t i = 0; i < n; i++) body(i);
        return;
    }
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < n; i++) body(i);
}
