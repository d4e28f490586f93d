// Whether this CPU has what the library was compiled for.
#include "simd.hpp"

// Name of an instruction set that the library uses and this CPU lacks; "" if there is none.
EXPORT const char* simd_missing() {
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("avx512f")) return "avx512f";
#endif
#if defined(__AVX512BW__)
    if (!__builtin_cpu_supports("avx512bw")) return "avx512bw";
#endif
#if defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2")) return "avx2";
#endif
#if defined(__FMA__)
    if (!__builtin_cpu_supports("fma")) return "fma";
#endif
    return "";
}
