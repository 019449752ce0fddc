/* gram_norm. Features are contiguous, so inner products read consecutive memory. A tile multiplies SIDE rows with SIDE
   rows, and keeps their sums in registers over all features. */

#include "shared.h"
#include <math.h>

#define SIDE (REGISTERS == 32 ? 5 : 3)
#define TILE (SIDE * SIDE)
#define TREES ((TILE + LANES - 1) / LANES)
#define DIAGONAL ((SIDE + LANES - 1) / LANES) /* trees that sum a tile's diagonal */
#define PANEL 393216 /* bytes of positions that stay in a second-level cache while others stream through */

/* Sum the lanes of LANES vectors at once: add halves of two vectors until each vector has one lane left. */

#define OWN(l, h) ((l) & (h) ? (l) + LANES : (l))
#define OTHER(l, h) ((l) & (h) ? ((l) ^ (h)) + LANES : (l) ^ (h))
#define TWO(f, l, h) f(l, h), f((l) + 1, h)
#define FOUR(f, l, h) TWO(f, l, h), TWO(f, (l) + 2, h)
#define EIGHT(f, l, h) FOUR(f, l, h), FOUR(f, (l) + 4, h)
#if BYTES / SIZE == 16
#define ALL(f, h) EIGHT(f, 0, h), EIGHT(f, 8, h)
#elif BYTES / SIZE == 8
#define ALL(f, h) EIGHT(f, 0, h)
#elif BYTES / SIZE == 4
#define ALL(f, h) FOUR(f, 0, h)
#else
#define ALL(f, h) TWO(f, 0, h)
#endif
#define HALVE(h)                                                                        \
  UNROLL for (int i = 0; i < (h); i++) x[i] =                                           \
      __builtin_shufflevector(x[2 * i], x[2 * i + 1], ALL(OWN, h)) +                    \
      __builtin_shufflevector(x[2 * i], x[2 * i + 1], ALL(OTHER, h));

/* Index of the i-th vector's sum in the output of several trees: the bits of i reversed within its tree. */
INLINE int lane(int i) {
  int found = 0;
  UNROLL for (int h = 1; h < LANES; h *= 2) found = 2 * found + ((i & h) != 0);
  return i / LANES * LANES + found;
}

INLINE void sums(const vector *v, REAL *out) {
  vector x[LANES];
  UNROLL for (int i = 0; i < LANES; i++) x[i] = v[i];
#if BYTES / SIZE >= 16
  HALVE(8)
#endif
#if BYTES / SIZE >= 8
  HALVE(4)
#endif
#if BYTES / SIZE >= 4
  HALVE(2)
#endif
  HALVE(1)
  store(out, x[0]);
}

typedef struct {
  const REAL *x;
  I features, sample, position; /* strides, in entries */
} rows;

typedef struct {
  rows a, g;
  I positions, parts;
  double lost[2];
  REAL *out; /* [n, parts, 3] */
} gram_job;

/* Products of SIDE rows from t on with SIDE rows from s on, not yet summed over lanes. Beyond the end the last row
   repeats; `of_positions` ignores the repeats. */
APART void dots(const rows *of, I sample, I t, I s, I end, vector *out) {
  const REAL *x[SIDE], *y[SIDE], *first = of->x + sample * of->sample;
  const I features = of->features, stride = of->position;
  vector found[SIDE][SIDE], u[SIDE];
  UNROLL for (int i = 0; i < SIDE; i++) {
    x[i] = first + (t + i < end ? t + i : end - 1) * stride;
    y[i] = first + (s + i < end ? s + i : end - 1) * stride;
    UNROLL for (int j = 0; j < SIDE; j++) found[i][j] = (vector){0};
  }
  I k = 0;
  for (; k + LANES <= features; k += LANES) {
    UNROLL for (int i = 0; i < SIDE; i++) u[i] = load(x[i] + k);
    UNROLL for (int j = 0; j < SIDE; j++) {
      vector w = load(y[j] + k);
      UNROLL for (int i = 0; i < SIDE; i++) found[i][j] += u[i] * w;
    }
  }
  if (k < features) {
    UNROLL for (int i = 0; i < SIDE; i++) u[i] = beginning(x[i] + k, features - k);
    UNROLL for (int j = 0; j < SIDE; j++) {
      vector w = beginning(y[j] + k, features - k);
      UNROLL for (int i = 0; i < SIDE; i++) found[i][j] += u[i] * w;
    }
  }
  UNROLL for (int i = 0; i < SIDE; i++) UNROLL for (int j = 0; j < SIDE; j++) out[i * SIDE + j] = found[i][j];
}

/* The diagonals of both Gram matrices hold the rows' squared norms, from which the reach is computed. */
static void add_reaches(const gram_job *job, const vector *tile, const REAL *inputs, I left, double *found) {
  vector diagonal[DIAGONAL * LANES];
  REAL gradients[DIAGONAL * LANES];
  UNROLL for (int i = 0; i < DIAGONAL * LANES; i++) diagonal[i] = i < SIDE ? tile[i * (SIDE + 1)] : (vector){0};
  UNROLL for (int i = 0; i < DIAGONAL; i++) sums(diagonal + i * LANES, gradients + i * LANES);
  for (int i = 0; i < SIDE && i < left; i++)
    add_reach(job->lost, sqrt(inputs[lane(i * (SIDE + 1))]), sqrt(gradients[lane(i)]), found);
}

/* A sample's sum over t in [start, stop) in the lower triangle with the diagonal. */
static double of_positions(const gram_job *job, I sample, I start, I stop, double *reach) {
  I end = job->positions, panel = PANEL / ((job->a.features + job->g.features) * (I)sizeof(REAL)) / SIDE * SIDE;
  double total = 0;
  if (panel < 4 * SIDE) panel = 4 * SIDE;
  for (I begin = 0; begin < stop; begin += panel)
    for (I t = begin > start ? begin : start; t < stop; t += SIDE) {
      vector found = {0};
      for (I s = begin; s <= t && s < begin + panel; s += SIDE) {
        vector tile[TREES * LANES], part[4] = {{0}, {0}, {0}, {0}};
        REAL inputs[TREES * LANES];
        UNROLL for (int i = TILE; i < TREES * LANES; i++) tile[i] = (vector){0};
        dots(&job->a, sample, t, s, end, tile);
        UNROLL for (int i = 0; i < TREES; i++) sums(tile + i * LANES, inputs + i * LANES);
        if (t + SIDE > end)
          for (int i = 0; i < TILE; i++)
            if (t + i / SIDE >= end || s + i % SIDE >= end) inputs[lane(i)] = 0;
        dots(&job->g, sample, t, s, end, tile);
        UNROLL for (int i = 0; i < TILE; i++) part[i % 4] += tile[i] * inputs[lane(i)];
        if (s == t) add_reaches(job, tile, inputs, end - t, reach);
        part[0] = (part[0] + part[1]) + (part[2] + part[3]);
        found += s == t ? part[0] : part[0] + part[0];
      }
      total += sum(found);
    }
  return total;
}

static void gram_units(I low, I high, void *given) {
  const gram_job *job = given;
  I tiles = (job->positions + SIDE - 1) / SIDE, step = (tiles + job->parts - 1) / job->parts * SIDE;
  for (I unit = low; unit < high; unit++) {
    I part = unit % job->parts, start;
    part = part % 2 ? job->parts - 1 - part / 2 : part / 2; /* pairs short parts with long ones on one thread */
    start = part * step;
    I stop = start + step < job->positions ? start + step : job->positions;
    double found[3] = {0, 0, 0};
    if (start < stop) found[0] = of_positions(job, unit / job->parts, start, stop, found + 1);
    for (int i = 0; i < 3; i++) job->out[3 * unit + i] = found[i];
  }
}

/* Squared norms and reaches [samples, parts, 3]. `sizes`: positions; then for a and for g: features, stride of a sample,
   stride of a position; and parts. */
void gram_norm(for_each *parallel, const REAL *a, const REAL *g, const I *sizes, I samples, double beside_inputs,
               double beside_outputs, REAL *out) {
  const I *n = sizes;
  gram_job job = {{a, n[1], n[2], n[3]}, {g, n[4], n[5], n[6]}, n[0], n[7], {beside_inputs, beside_outputs}, out};
  each(parallel, samples * n[7], 0.5 * n[0] * n[0] * (n[1] + n[4]) / n[7], gram_units, &job);
}
