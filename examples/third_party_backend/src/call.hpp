// How Python calls: each function gets one address, of its arguments packed into eight bytes each (ctypes converts them in a tenth of
// the time that it takes for one after the other).
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#define EXPORT extern "C" __attribute__((visibility("default")))

template <class T>
inline T argument(int64_t word) {
    static_assert(sizeof(T) == sizeof word, "arguments are int64_t, double or addresses");
    T value;
    std::memcpy(&value, &word, sizeof word);
    return value;
}

template <class... A, size_t... I>
inline void call_with(void (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
    function(argument<A>(words[I])...);
}

template <class... A>
inline void call_with(void (*function)(A...), const int64_t* words) {
    call_with(function, words, std::index_sequence_for<A...>{});
}

// OP(name, parameters) { body }: the exported function `name` with these parameters.
#define OP(name, ...)                                                     \
    static void name##_op(__VA_ARGS__);                                   \
    EXPORT void name(const int64_t* words) { call_with(name##_op, words); } \
    static void name##_op(__VA_ARGS__)
