// Sixteen vectors at once: transposed, or summed lane by lane.
#pragma once

#include "simd.hpp"

namespace shuffles {

// Of lanes j of a and b, in pairs `S` apart: the first of each pair (b's behind a's), the second of each pair.
template <int S>
inline F firsts(F a, F b) {
    I from;
    for (int j = 0; j < LANES; j++) from[j] = j & S ? LANES + j - S : j;
    return __builtin_shuffle(a, b, from);
}
template <int S>
inline F seconds(F a, F b) {
    I from;
    for (int j = 0; j < LANES; j++) from[j] = j & S ? LANES + j : j + S;
    return __builtin_shuffle(a, b, from);
}

template <int S>
inline void exchange(F* v) {
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) {
            const F a = v[i], b = v[i + S];
            v[i] = firsts<S>(a, b), v[i + S] = seconds<S>(a, b);
        }
}

template <int S>
inline void fold(F* v) {
    for (int i = 0; i < S; i++) v[i] = firsts<S>(v[i], v[i + S]) + seconds<S>(v[i], v[i + S]);
}

}  // namespace shuffles

// Lane j of v[i] becomes lane i of v[j].
inline void transpose(F* v) {
    shuffles::exchange<8>(v), shuffles::exchange<4>(v), shuffles::exchange<2>(v), shuffles::exchange<1>(v);
}

// Lane j is total(v[j]), bit for bit. Overwrites v.
inline F totals(F* v) {
    shuffles::fold<8>(v), shuffles::fold<4>(v), shuffles::fold<2>(v), shuffles::fold<1>(v);
    return v[0];
}
