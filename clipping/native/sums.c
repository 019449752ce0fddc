/* Sums bound by memory bandwidth, which read their input once: squares, scale_gradients, reaches. */

#include "shared.h"
#include <math.h>

#define LONG 4096 /* entries summed in a REAL; longer sums continue in a double */
#define DEPTH 32 /* positions summed in a block */
#define CHUNK 256 /* features whose sums stay in a first-level cache */

typedef struct {
  const REAL *x, *mean, *rstd, *g;
  I positions, features;
  REAL *out;
} sums_job;

static double square(const REAL *x, I features) {
  double total = 0;
  for (I start = 0; start < features; start += LONG) {
    I k = start, stop = start + LONG < features ? start + LONG : features;
    vector found[4] = {{0}, {0}, {0}, {0}};
    for (; k + 4 * LANES <= stop; k += 4 * LANES)
      UNROLL for (int i = 0; i < 4; i++) found[i] += load(x + k + i * LANES) * load(x + k + i * LANES);
    total += sum((found[0] + found[1]) + (found[2] + found[3]));
    for (; k < stop; k++) total += (double)x[k] * x[k];
  }
  return total;
}

static void square_units(I low, I high, void *given) {
  const sums_job *job = given;
  for (I unit = low; unit < high; unit++) job->out[unit] = square(job->x + unit * job->features, job->features);
}

/* Sums of squares of `samples` contiguous rows of x. */
void squares(for_each *parallel, const REAL *x, I samples, I features, REAL *out) {
  sums_job job = {x, 0, 0, 0, 1, features, out};
  each(parallel, samples, features, square_units, &job);
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

/* Sums over positions of g (x - mean) rstd, [samples, features]; all inputs are contiguous. */
void scale_gradients(for_each *parallel, const REAL *x, const REAL *mean, const REAL *rstd, const REAL *g, I samples,
                     I positions, I features, REAL *out) {
  sums_job job = {x, mean, rstd, g, positions, features, out};
  each(parallel, samples, (double)positions * features, scale_units, &job);
}

typedef struct {
  const REAL *a, *g;
  const I *sizes;
  double lost[2];
  REAL *out;
} reach_job;

static void row_units(I low, I high, void *given) {
  const reach_job *job = given;
  const I *of = job->sizes; /* positions; then for a and for g: features, stride of a sample, stride of a position */
  for (I unit = low; unit < high; unit++) {
    const REAL *a = job->a + unit * of[2], *g = job->g + unit * of[5];
    double found[2] = {0, 0};
    for (I t = 0; t < of[0]; t++)
      add_reach(job->lost, sqrt(square(a + t * of[3], of[1])), sqrt(square(g + t * of[6], of[4])), found);
    for (int i = 0; i < 2; i++) job->out[2 * unit + i] = found[i];
  }
}

/* Reaches of linear layers: a [samples, positions, features], g likewise; [samples, 2]. */
void row_reaches(for_each *parallel, const REAL *a, const REAL *g, const I *sizes, I samples, double beside_inputs,
                 double beside_outputs, REAL *out) {
  reach_job job = {a, g, sizes, {beside_inputs, beside_outputs}, out};
  each(parallel, samples, (double)sizes[0] * (sizes[1] + sizes[4]), row_units, &job);
}

static void patch_units(I low, I high, void *given) {
  const reach_job *job = given;
  const I *n = job->sizes, *m = n + 2, *kernel = n + 4, *stride = n + 6, *padding = n + 8, *dilation = n + 10;
  for (I unit = low; unit < high; unit++) {
    const REAL *pixels = job->a + unit * n[0] * n[1], *g = job->g + unit * m[0] * m[1];
    double found[2] = {0, 0};
    for (I t = 0; t < m[0]; t++)
      for (I s = 0; s < m[1]; s++) {
        double patch = 0;
        for (I i = 0; i < kernel[0]; i++) {
          I row = t * stride[0] - padding[0] + i * dilation[0];
          if (row < 0 || row >= n[0]) continue;
          for (I j = 0; j < kernel[1]; j++) {
            I column = s * stride[1] - padding[1] + j * dilation[1];
            if (column < 0 || column >= n[1]) continue;
            double pixel = pixels[row * n[1] + column];
            patch += pixel * pixel;
          }
        }
        add_reach(job->lost, sqrt(patch), g[t * m[1] + s], found);
      }
    for (int i = 0; i < 2; i++) job->out[2 * unit + i] = found[i];
  }
}

/* Reaches of convolutions [samples, 2], from norms of pixels [samples, rows, columns]: a of images, g of the output's
   gradient. `sizes`: rows and columns of a, of g; then two each of kernel, stride, padding, dilation. */
void patch_reaches(for_each *parallel, const REAL *a, const REAL *g, const I *sizes, I samples, double beside_inputs,
                   double beside_outputs, REAL *out) {
  reach_job job = {a, g, sizes, {beside_inputs, beside_outputs}, out};
  each(parallel, samples, 4.0 * sizes[2] * sizes[3] * sizes[4] * sizes[5], patch_units, &job);
}
