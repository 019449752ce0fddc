/* What is read once, and so takes as long as memory does: squares, column_norms, scale_gradients. */

#include "shared.h"
#include <math.h>

#define LONG 4096 /* entries that are summed up in a REAL */
#define DEPTH 32 /* positions likewise */
#define CHUNK 256 /* features whose sums stay in a first-level cache */

typedef struct {
  const REAL *x, *mean, *rstd, *g;
  I positions, features;
  REAL *out;
} sums_job;

static void square_units(I low, I high, void *given) {
  const sums_job *job = given;
  for (I unit = low; unit < high; unit++) {
    const REAL *x = job->x + unit * job->features;
    double total = 0;
    for (I start = 0; start < job->features; start += LONG) {
      I k = start, stop = start + LONG < job->features ? start + LONG : job->features;
      vector found[4] = {{0}, {0}, {0}, {0}};
      for (; k + 4 * LANES <= stop; k += 4 * LANES)
        UNROLL for (int i = 0; i < 4; i++) found[i] += load(x + k + i * LANES) * load(x + k + i * LANES);
      total += sum((found[0] + found[1]) + (found[2] + found[3]));
      for (; k < stop; k++) total += (double)x[k] * x[k];
    }
    job->out[unit] = total;
  }
}

/* Sums of squares of `samples` rows of x, one after the other in memory. */
void squares(for_each *parallel, const REAL *x, I samples, I features, REAL *out) {
  sums_job job = {x, 0, 0, 0, 1, features, out};
  each(parallel, samples, features, square_units, &job);
}

static void column_units(I low, I high, void *given) {
  const sums_job *job = given;
  const I rows = job->positions, columns = job->features;
  for (I unit = low; unit < high; unit++) {
    const REAL *x = job->x + unit * rows * columns;
    REAL *out = job->out + unit * columns;
    for (I start = 0; start < columns; start += CHUNK) {
      I count = start + CHUNK < columns ? CHUNK : columns - start;
      REAL found[CHUNK] = {0};
      for (I t = 0; t < rows; t++) {
        const REAL *row = x + t * columns + start;
        for (I k = 0; k < count; k++) found[k] += row[k] * row[k];
      }
      for (I k = 0; k < count; k++) out[start + k] = sqrt((double)found[k]);
    }
  }
}

/* Norms of the columns of matrices [samples, rows, columns] in one piece: [samples, columns]. */
void column_norms(for_each *parallel, const REAL *x, I samples, I rows, I columns, REAL *out) {
  sums_job job = {x, 0, 0, 0, rows, columns, out};
  each(parallel, samples, (double)rows * columns, column_units, &job);
}

static void scale_units(I low, I high, void *given) {
  const sums_job *job = given;
  I features = job->features, positions = job->positions;
  for (I unit = low; unit < high; unit++) {
    const REAL *mean = job->mean + unit * positions, *rstd = job->rstd + unit * positions;
    REAL *out = job->out + unit * features;
    for (I start = 0; start < features; start += CHUNK) {
      I count = start + CHUNK < features ? CHUNK : features - start;
      for (I k = 0; k < count; k++) out[start + k] = 0;
      for (I first = 0; first < positions; first += DEPTH) {
        REAL found[CHUNK] = {0};
        for (I t = first; t < first + DEPTH && t < positions; t++) {
          const REAL *x = job->x + (unit * positions + t) * features + start;
          const REAL *g = job->g + (unit * positions + t) * features + start;
          const REAL m = mean[t], r = rstd[t];
          for (I k = 0; k < count; k++) found[k] += (x[k] - m) * r * g[k];
        }
        for (I k = 0; k < count; k++) out[start + k] += found[k];
      }
    }
  }
}

/* Sums over positions of g (x - mean) rstd, [samples, features]; all that is given lies in one piece. */
void scale_gradients(for_each *parallel, const REAL *x, const REAL *mean, const REAL *rstd, const REAL *g, I samples,
                     I positions, I features, REAL *out) {
  sums_job job = {x, mean, rstd, g, positions, features, out};
  each(parallel, samples, (double)positions * features, scale_units, &job);
}
