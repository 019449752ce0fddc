/* Discrete Gaussian noise on a grid, in integers: clipping/noise/discrete.py describes it, and has the same in Python.

   Each group of 128 coordinates reads its own stream, and uses as many words as its rejections need. The time of a draw
   therefore depends on its value, but never on the total that it is added to. */

#include "cipher.h"

#define COST (GROUP * 2000.0)
#define WIDEST 0x1p43 /* totals are clamped to this many units of the grid; the rounding error is at most 2^-10 */

typedef unsigned __int128 wide;

#define HELD (BLOCKS * WORDS / 2) /* 64-bit words of a set */

typedef struct {
  uint32_t states[SETS][WORDS]; /* of consecutive sets */
  blocks bits[SETS];
  int used; /* number of 64-bit words used */
} stream;

/* Start at the first block, with the key and nonce of the first state. */
static void begin(stream *from) {
  for (int s = 0; s < SETS; s++) {
    if (s) memcpy(from->states[s], from->states[0], sizeof(from->states[s]));
    from->states[s][12] = s * BLOCKS;
  }
  from->used = SETS * HELD;
}

static uint64_t word(stream *from) {
  if (from->used == SETS * HELD) {
    chacha(from->states, from->bits);
    for (int s = 0; s < SETS; s++) from->states[s][12] += SETS * BLOCKS;
    from->used = 0;
  }
  int set = from->used / HELD, block = from->used % HELD / (WORDS / 2), pair = 2 * (from->used % (WORDS / 2));
  from->used++;
  return from->bits[set][pair][block] | (uint64_t)from->bits[set][pair + 1][block] << 32;
}

/* Uniform below 2^bits; 0 < bits <= 128. */
static wide uniform(stream *from, int bits) {
  if (bits <= 64) return word(from) >> (64 - bits);
  wide high = word(from);
  return (high << 64 | word(from)) >> (128 - bits);
}

/* True with probability 1 / k. */
static int one_of(stream *from, uint64_t k) {
  uint64_t left_over = (0 - k) % k, found; /* 2^64 mod k words are rejected, as they would favour some remainders */
  do found = word(from);
  while (found > UINT64_MAX - left_over);
  return found % k == 0;
}

/* True with probability exp(-a / 2^bits); a <= 2^bits. */
static int survives(stream *from, wide a, int bits) {
  uint64_t k = 1;
  while ((k == 1 || one_of(from, k)) && (a >> bits || uniform(from, bits) < a)) k++;
  return k & 1;
}

static int survives_one(stream *from) { return survives(from, 1, 0); }

/* A draw with probability proportional to exp(-x² / 2^(2 log + 1)). */
static I discrete(stream *from, int log) {
  for (;;) {
    uint64_t low = (uint64_t)uniform(from, log);
    if (!survives(from, low, log)) continue;
    I size = 0;
    while (survives_one(from)) size++;
    size = size << log | (I)low; /* geometric with exp(-1 / 2^log) */
    int negative = (int)uniform(from, 1);
    if (negative && !size) continue;
    I beyond = size - ((I)1 << log);
    wide square = (wide)((__int128)beyond * beyond), whole = square >> (2 * log + 1);
    while (whole && survives_one(from)) whole--;
    if (!whole && survives(from, square & (((wide)1 << (2 * log + 1)) - 1), 2 * log + 1)) return negative ? -size : size;
  }
}

static void discrete_units(I low, I high, void *given) {
  const noise_job *job = given;
  stream from;
  I tensor = tensor_of(job, low), keyed = -1;
  for (I unit = low; unit < high; unit++) {
    while (unit >= job->units[tensor + 1]) tensor++;
    if (tensor != keyed) { /* each tensor has its own key, so that a group's stream can be arbitrarily long */
      uint32_t *state = from.states[0];
      memcpy(state, job->state, sizeof(from.states[0]));
      state[15] = job->labels[tensor];
      begin(&from);
      chacha(from.states, from.bits);
      for (int w = 0; w < 8; w++) state[4 + w] = from.bits[0][w][0];
      keyed = tensor;
    }
    I group = unit - job->units[tensor], left = job->counts[tensor] - group * GROUP;
    from.states[0][13] = (uint32_t)group, from.states[0][14] = (uint32_t)(group >> 32), from.states[0][15] = 0;
    begin(&from);
    REAL *totals = job->flat + unit * GROUP;
    for (I i = 0; i < (left < GROUP ? left : GROUP); i++) {
      double total = totals[i] / job->grid;
      total = total < -WIDEST ? -WIDEST : total > WIDEST ? WIDEST : total;
      I nearest = (I)((total + 0x1.8p52) - 0x1.8p52);
      totals[i] = (REAL)((double)(nearest + discrete(&from, (int)job->scale)) * job->unit);
    }
  }
}

/* Replace each total by (total / grid, rounded, + a discrete Gaussian of deviation 2^log) · unit. */
void discrete_noisy(for_each *parallel, const uint32_t *state, const uint32_t *labels, REAL *flat, const I *counts,
                    const I *units, I tensors, double log, double grid, double unit) {
  noise_job job = {state, labels, flat, counts, units, tensors, log, grid, unit};
  each(parallel, units[tensors], COST, discrete_units, &job);
}
