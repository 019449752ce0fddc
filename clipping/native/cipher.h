/* ChaCha20 (RFC 8439), sets of 16 blocks at once: word w of a set's block b is at [w][b], so that a vector holds one
   word of many blocks, and two words of neighbouring blocks read as one 64-bit word. No branches and no tables: the
   values drawn change neither instructions nor addresses. */

#pragma once

#include "shared.h"

#define BLOCKS 16
#define WORDS 16
#define ROUNDS 20
#define GROUP 128 /* coordinates drawn together from one set */
#ifdef __AVX512F__
#define SETS 2 /* each operation waits for the previous one of its set only; two sets fill the registers */
#else
#define SETS 1
#endif

typedef uint32_t blocks[WORDS][BLOCKS];

typedef uint32_t words __attribute__((vector_size(BYTES)));

#define AT_ONCE (BYTES / 4) /* blocks */

#if defined(__AVX2__) && !defined(__AVX512VL__) && !defined(__clang__)
/* No instruction rotates words. A byte shuffle, which GCC does not find by itself, does three of the rotations. */
typedef uint8_t bytes __attribute__((vector_size(BYTES)));

INLINE words rotated(words x, int bits) {
  if (bits % 8) return x << bits | x >> (32 - bits);
  bytes from;
  UNROLL for (int i = 0; i < BYTES; i++) from[i] = i / 4 * 4 + ((i - bits / 8) & 3);
  return (words)__builtin_shuffle((bytes)x, from);
}
#else
INLINE words rotated(words x, int bits) { return x << bits | x >> (32 - bits); }
#endif

#define QUARTER(a, b, c, d)                                                                                            \
  a += b, d = rotated(d ^ a, 16), c += d, b = rotated(b ^ c, 12), a += b, d = rotated(d ^ a, 8), c += d,               \
      b = rotated(b ^ c, 7)

/* states: the constant, the key, the number of the first block, the nonce (RFC 8439, section 2.3). */
APART void chacha(const uint32_t states[SETS][WORDS], blocks out[SETS]) {
  for (int first = 0; first < BLOCKS; first += AT_ONCE) {
    words found[SETS][WORDS], count = {0};
    for (int i = 0; i < AT_ONCE; i++) count[i] = first + i;
    UNROLL for (int s = 0; s < SETS; s++) UNROLL for (int w = 0; w < WORDS; w++) {
      found[s][w] = (w == 12 ? count : (words){0}) + states[s][w];
    }
    for (int round = 0; round < ROUNDS; round += 2) UNROLL for (int s = 0; s < SETS; s++) {
      words *x = found[s];
      QUARTER(x[0], x[4], x[8], x[12]), QUARTER(x[1], x[5], x[9], x[13]);
      QUARTER(x[2], x[6], x[10], x[14]), QUARTER(x[3], x[7], x[11], x[15]);
      QUARTER(x[0], x[5], x[10], x[15]), QUARTER(x[1], x[6], x[11], x[12]);
      QUARTER(x[2], x[7], x[8], x[13]), QUARTER(x[3], x[4], x[9], x[14]);
    }
    UNROLL for (int s = 0; s < SETS; s++) UNROLL for (int w = 0; w < WORDS; w++) {
      found[s][w] += (w == 12 ? count : (words){0}) + states[s][w];
      memcpy(&out[s][w][first], &found[s][w], BYTES);
    }
  }
}

/* Tensors to add noise to, in one flat tensor; each begins at a group. labels: the last word of each tensor's nonce.
   counts: its number of entries. units: the index of its first group; one more number marks the end.
   grid, unit: distance between neighbouring results, and what that becomes in the tensors. */
typedef struct {
  const uint32_t *state, *labels;
  REAL *flat;
  const I *counts, *units;
  I tensors;
  double scale, grid, unit;
} noise_job;

/* Find the tensor of a group: the last one that begins at or before it. */
INLINE I tensor_of(const noise_job *job, I unit) {
  I tensor = 0, last = job->tensors - 1;
  while (tensor < last) {
    I middle = (tensor + last + 1) / 2;
    if (job->units[middle] <= unit)
      tensor = middle;
    else
      last = middle - 1;
  }
  return tensor;
}
