// Annotations for compilers, of loops over memory that may be the same.
#pragma once

/// Before a loop whose iterations touch one index only, so that `to` may be `from`: it may be
/// vectorised without a check for overlap.
#if defined(__clang__)
#define FARANDOLE_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define FARANDOLE_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
