/* Add normals from ChaCha20 to a sum: clipping/noise/chacha.py describes them, and has the same in torch.

   A group is 16 blocks of the cipher, 128 normals; see cipher.h. The code has no branches and no tables. */

#include "cipher.h"

#define COST (GROUP * 40.0)

typedef uint64_t longs __attribute__((vector_size(BYTES)));
typedef int64_t integers __attribute__((vector_size(BYTES)));
typedef double doubles __attribute__((vector_size(BYTES)));

#define HALF (BYTES / 8) /* words of 64 bits */

/* Signed integers as float64, rounded to the nearest. */
INLINE doubles converted(longs x) {
#if defined(__AVX__) && !defined(__AVX512DQ__)
  /* No instruction does this. Both halves are exact, and their sum is rounded once. */
  doubles high = (doubles)(x >> 32 ^ 0x4530000080000000) - (0x1p84 + 0x1p63 + 0x1p52); /* 2^84 + 2^63 + 2^32 half */
  return high + (doubles)((x & 0xffffffff) | 0x4330000000000000);                     /* 2^52 + half */
#else
  return __builtin_convertvector((integers)x, doubles);
#endif
}

/* √(-2 ln u), u = (⌊z/2⌋ + ½) 2⁻⁶³: u = m 2ᵏ with √½ <= m < √2, and ln m = 2 artanh(s), s = (m - 1) / (m + 1). */
INLINE doubles radius(longs z) {
  doubles u = converted(z >> 1) + 0.5;
  longs above = (longs)u - 0x3fd6a09e667f3bcd; /* √½ / 2 */
  longs power = above >> 52;
  doubles m = (doubles)((longs)u - (power << 52)) * 2;
  doubles k = (doubles)(power | 0x4330000000000000) - (0x1p52 + 64);
  doubles f = m - 1, s = f / (m + 1), q = s * s;
  /* 2 artanh(s) = 2 s + s q series, within 2^-58: the coefficients of fdlibm's e_log.c (Sun 1993) */
  doubles series = q * 1.479819860511658591e-01 + 1.531383769920937332e-01;
  series = q * (q * series + 1.818357216161805012e-01) + 2.222219843214978396e-01;
  series = q * (q * series + 2.857142874366239149e-01) + 3.999999999940941908e-01;
  series = q * series + 6.666666666666735130e-01;
  /* 2 s = f - s f: the rounding error of s does not enter the larger term */
  doubles log = f - s * (f - q * series), square = -2 * (k * 0x1.62e42fefa39efp-1 + log), root;
  UNROLL for (int i = 0; i < HALF; i++) root[i] = __builtin_sqrt(square[i]);
  return root;
}

/* 128 normals by Box and Muller, from 8 x 8 pairs of words. The two highest bits of the second word choose a quarter of
   the circle, the others the angle in it. */
APART void normals(const blocks given, double out[GROUP]) {
  for (int w = 0; w < WORDS / 2; w++)
    for (int first = 0; first < 8; first += HALF) {
      longs z, a;
      memcpy(&z, &given[w][2 * first], BYTES);
      memcpy(&a, &given[w + WORDS / 2][2 * first], BYTES);
      doubles r = radius(z);
      doubles x = converted(a << 2 | 2) * (0x1.921fb54442d18p-1 * 0x1p-63), q = x * x;
      doubles c = q * (1.0 / 20922789888000) - 1.0 / 87178291200, s = q * (1.0 / 355687428096000) - 1.0 / 1307674368000;
      c = q * (q * (q * (q * c + 1.0 / 479001600) - 1.0 / 3628800) + 1.0 / 40320) - 1.0 / 720;
      s = q * (q * (q * (q * s + 1.0 / 6227020800) - 1.0 / 39916800) + 1.0 / 362880) - 1.0 / 5040;
      c = q * (q * (q * c + 1.0 / 24) - 0.5) + 1;
      s = x + x * (q * (q * (q * s + 1.0 / 120) - 1.0 / 6));
      longs cosine = (longs)(r * c) ^ (a & 0x8000000000000000), sine = (longs)(r * s);
      longs swapped = (cosine ^ sine) & -(a >> 62 & 1);
      cosine ^= swapped, sine ^= swapped;
      memcpy(&out[w * 16 + first], &cosine, BYTES);
      memcpy(&out[w * 16 + 8 + first], &sine, BYTES);
    }
}

INLINE void add(const noise_job *job, const double *drawn, I count, REAL *total) {
  const double deviation = job->scale, finer = 1 / job->grid, unit = job->unit;
  const double integer = 0x1.8p52; /* adding this removes the fraction */
  for (I i = 0; i < count; i++) {
    double sum = total[i] + drawn[i] * deviation;
    total[i] = (REAL)(((sum * finer + integer) - integer) * unit);
  }
}

static void noise_units(I low, I high, void *given) {
  const noise_job *job = given;
  uint32_t states[SETS][WORDS];
  blocks bits[SETS] __attribute__((aligned(64)));
  double drawn[GROUP] __attribute__((aligned(64)));
  I tensor = tensor_of(job, low), tensors[SETS], starts[SETS];
  for (int s = 0; s < SETS; s++) memcpy(states[s], job->state, sizeof(states[s]));
  for (I unit = low; unit < high; unit += SETS) {
    int sets = high - unit < SETS ? (int)(high - unit) : SETS;
    for (int s = 0; s < sets; s++) {
      while (unit + s >= job->units[tensor + 1]) tensor++;
      I group = unit + s - job->units[tensor];
      tensors[s] = tensor, starts[s] = group * GROUP;
      states[s][12] = (uint32_t)group * BLOCKS;
      states[s][15] = job->labels[tensor];
    }
    chacha(states, bits);
    for (int s = 0; s < sets; s++) {
      I start = starts[s], left = job->counts[tensors[s]] - start;
      REAL *total = job->flat + (unit + s) * GROUP;
      normals(bits[s], drawn);
      if (left >= GROUP)
        add(job, drawn, GROUP, total);
      else
        add(job, drawn, left, total);
    }
  }
}

/* Add N(0, deviation²) to each tensor, round to multiples of grid, a power of two, and multiply by unit / grid. */
void noisy(for_each *parallel, const uint32_t *state, const uint32_t *labels, REAL *flat, const I *counts,
           const I *units, I tensors, double deviation, double grid, double unit) {
  noise_job job = {state, labels, flat, counts, units, tensors, deviation, grid, unit};
  each(parallel, units[tensors], COST, noise_units, &job);
}
