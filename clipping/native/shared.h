/* Shared by the CPU kernels. clipping/accel/cpu.py describes what they compute and how they are compiled.

   Compiled once for REAL = float and once for double (SIZE bytes each), for the present processor and its vector
   width. Threads are torch's: `parallel` is its torch_parallel_for. */

#pragma once

#include <stdint.h>
#include <string.h>

typedef int64_t I;

#if defined(__AVX512F__)
#define BYTES 64 /* of a vector */
#define REGISTERS 32
#elif defined(__AVX__)
#define BYTES 32
#define REGISTERS 16
#elif defined(__aarch64__)
#define BYTES 16
#define REGISTERS 32
#else
#define BYTES 16
#define REGISTERS 16
#endif
#define LANES (BYTES / SIZE)
#define WORK 200000 /* multiplications that justify another thread */

#define UNROLL _Pragma("GCC unroll 64")
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* not inlined, so that it can use all registers */

typedef REAL vector __attribute__((vector_size(BYTES)));
typedef REAL unaligned __attribute__((vector_size(BYTES), aligned(SIZE)));
typedef void body(I, I, void *);
typedef int32_t for_each(I, I, I, body *, void *);
typedef int32_t index_of_thread(uint32_t *);

INLINE vector load(const REAL *p) { return *(const unaligned *)p; }
INLINE void store(REAL *p, vector v) { *(unaligned *)p = v; }

INLINE vector beginning(const REAL *p, I count) {
  vector v = {0};
  memcpy(&v, p, count * sizeof(REAL));
  return v;
}

INLINE double sum(vector v) {
  double total = 0;
  UNROLL for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

/* Add a position to a reach: the product of its rows' norms, and the bound on underflow (rounding_bounds.py). */
INLINE void add_reach(const double lost[2], double a, double g, double found[2]) {
  found[0] += a * g;
  found[1] += a * lost[0] + g * lost[1];
}

static inline void each(for_each *parallel, I units, double multiplications, body *run, void *job) {
  I grain = multiplications < WORK ? (I)(WORK / (multiplications + 1)) + 1 : 1;
  parallel(0, units, grain, run, job);
}
