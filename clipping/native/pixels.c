/* pixel_norms and patch_reaches. Pixels are contiguous, as in an image's memory. A tile multiplies HIGH pixels with
   vectors of others, after a copy that makes its input contiguous: a large image's features are a power of two apart,
   and few of them would fit into a first-level cache at a time. */

#include <math.h>

#include "shared.h"

#define HIGH 6
#define DEEP (REGISTERS == 32 ? 4 : 2) /* vectors */
#define WIDE (DEEP * LANES)

/* Images in memory, with strides in entries. */
typedef struct {
  const REAL *x;
  I features, rows, columns, sample, feature, row, column;
} source;

typedef struct {
  source images;
  I count; /* of offsets */
  const I *offsets; /* [count, 2]: row and column */
} phase;

typedef struct {
  const phase *phases;
  const source *g;
  I count, positions, width, room;
  REAL *scratch;
  double lost[2];
  REAL *out; /* [n, 3] */
  index_of_thread *thread;
} pixel_job;

/* Features of one sample: strips of `width` pixels, [pixels / width, features, width], the last one zero-padded. */
typedef struct {
  const REAL *x;
  I features, pixels, width;
} image;

static I pixels_of(const source *of, I columns) { return of->rows * columns; }

/* Width of a strip: all pixels, if a tile's vectors hold them. */
static I width_of(I pixels) { return pixels > WIDE - LANES ? WIDE : (pixels + LANES - 1) / LANES * LANES; }

/* True if a feature's pixels, in rows of this many columns, are contiguous. */
static int is_plain(const source *of, I columns) {
  return of->columns == columns && of->column == 1 && of->row == columns;
}

/* True if no copy is needed: the image is one strip in memory. */
static int is_strip(const source *of, I columns) {
  I pixels = pixels_of(of, columns);
  return is_plain(of, columns) && of->feature == pixels && width_of(pixels) == pixels;
}

/* Number of entries of the copy. */
static I image_entries(const source *of, I columns) {
  I pixels = pixels_of(of, columns), width = width_of(pixels);
  return is_strip(of, columns) ? 0 : (pixels + width - 1) / width * width * of->features;
}

static image image_of(const source *of, I sample, I columns, REAL *copy) {
  I pixels = pixels_of(of, columns), width = width_of(pixels), places[WIDE];
  const REAL *x = of->x + sample * of->sample;
  REAL *to = copy;
  if (is_strip(of, columns)) return (image){x, of->features, pixels, width};
  for (I start = 0; start < pixels; start += width) {
    I count = pixels - start < width ? pixels - start : width, plain = is_plain(of, columns);
    for (I t = 0; t < width; t++) {
      I row = (start + t) / columns, column = (start + t) % columns;
      places[t] = t < count && column < of->columns ? row * of->row + column * of->column : -1;
    }
    for (I c = 0; c < of->features; c++, to += width) {
      const REAL *from = x + c * of->feature;
      I t = 0;
      for (; plain && t + LANES <= count; t += LANES) store(to + t, load(from + start + t));
      if (plain && t < count) store(to + t, beginning(from + start + t, count - t)), t += LANES;
      for (; t < width; t++) to[t] = places[t] < 0 ? 0 : from[places[t]];
    }
  }
  return (image){copy, of->features, pixels, width};
}

/* Inner products of HIGH pixels with `deep` vectors of a strip's pixels. */
INLINE void tile(const image *of, const REAL *const *rows, const REAL *strip, REAL *out, I pitch, int deep) {
  const REAL *row[HIGH];
  vector found[HIGH * DEEP], w[DEEP];
  UNROLL for (int i = 0; i < HIGH; i++) row[i] = rows[i];
  UNROLL for (int i = 0; i < HIGH * deep; i++) found[i] = (vector){0};
  for (I at = 0; at < of->features * of->width; at += of->width) {
    UNROLL for (int j = 0; j < deep; j++) w[j] = load(strip + at + j * LANES);
    UNROLL for (int i = 0; i < HIGH; i++) UNROLL for (int j = 0; j < deep; j++) found[i * deep + j] += w[j] * row[i][at];
  }
  UNROLL for (int i = 0; i < HIGH; i++)
    UNROLL for (int j = 0; j < deep; j++) store(out + i * pitch + j * LANES, found[i * deep + j]);
}

typedef void products(const image *, const REAL *const *, const REAL *, REAL *, I);
#define TILE(deep)                                                                                              \
  APART void tile_##deep(const image *of, const REAL *const *rows, const REAL *strip, REAL *out, I pitch) {      \
    tile(of, rows, strip, out, pitch, deep);                                                                    \
  }
TILE(1)
TILE(2)
#if DEEP == 4
TILE(3)
TILE(4)
static products *const tiles[DEEP] = {tile_1, tile_2, tile_3, tile_4};
#else
static products *const tiles[DEEP] = {tile_1, tile_2};
#endif

/* HIGH rows of the lower triangle of a pixel Gram matrix; entries above the diagonal are undefined. */
static void triangle(const image *of, I s, REAL *out, I pitch) {
  const REAL *rows[HIGH], *strip = of->x;
  I end = s + HIGH < of->pixels ? s + HIGH : of->pixels, t = 0;
  for (I i = 0; i < HIGH; i++) {
    I at = s + i < end ? s + i : end - 1;
    rows[i] = of->x + at / of->width * of->width * of->features + at % of->width;
  }
  for (; t + WIDE - LANES < end; t += WIDE, strip += WIDE * of->features) tiles[DEEP - 1](of, rows, strip, out + t, pitch);
  if (t < end) tiles[(end - t - 1) / LANES](of, rows, strip, out + t, pitch);
}

/* For each offset of each phase: 1 if the pixel that an output column reads is inside the row, else 0. */
static void mask_columns(const pixel_job *job, REAL *masks) {
  for (I k = 0; k < job->count; k++)
    for (I o = 0; o < job->phases[k].count; o++, masks += job->room)
      for (I t = 0; t < job->positions; t++) {
        I column = t % job->width + job->phases[k].offsets[2 * o + 1];
        masks[t] = column >= 0 && column < job->width;
      }
}

/* For one sample, the inner product of the sum of all shifted pixel Gram matrices with the Gram matrix of g; and its
   reach, from the squared norms on both diagonals. */
static double of_pixels(const pixel_job *job, I sample, const REAL *masks, REAL *scratch, double reach[2]) {
  I positions = job->positions, width = job->width, pitch = job->room;
  REAL *row = scratch, *grams = row + HIGH * pitch, *gram = grams, *copy = grams;
  double total = 0;
  reach[0] = reach[1] = 0;
  for (I k = 0; k < job->count; k++) copy += (pixels_of(&job->phases[k].images, width) + HIGH) * pitch;
  for (I k = 0; k < job->count; k++) {
    image x = image_of(&job->phases[k].images, sample, width, copy);
    for (I s = 0; s < x.pixels; s += HIGH) triangle(&x, s, gram + s * pitch, pitch);
    gram += (x.pixels + HIGH) * pitch;
  }
  image g = image_of(job->g, sample, width, copy);
  for (I start = 0; start < positions; start += HIGH) {
    triangle(&g, start, row, pitch);
    for (I t = start; t < start + HIGH && t < positions; t++) {
      REAL *of = row + (t - start) * pitch;
      const REAL *mask = masks;
      vector found = {0};
      double patch = 0;
      for (I s = 0; s < t; s++) of[s] *= 2; /* counts the upper triangle, too */
      for (I s = t + 1; s < (t / LANES + 2) * LANES; s++) of[s] = 0;
      gram = grams;
      for (I k = 0, count; k < job->count; gram += (count + HIGH) * pitch, k++) {
        count = pixels_of(&job->phases[k].images, width);
        for (I o = 0; o < job->phases[k].count; o++, mask += pitch) {
          I shift = job->phases[k].offsets[2 * o] * width + job->phases[k].offsets[2 * o + 1];
          if (t + shift < 0 || t + shift >= count || !mask[t]) continue;
          const REAL *pixels = gram + (t + shift) * pitch + shift;
          patch += pixels[t];
          for (I s = shift < 0 ? -shift : 0; s <= t; s += LANES)
            found += load(of + s) * load(mask + s) * load(pixels + s);
        }
      }
      total += sum(found);
      add_reach(job->lost, sqrt(patch), sqrt(of[t]), reach);
    }
  }
  return total;
}

static I offsets_of(const pixel_job *job) {
  I offsets = 0;
  for (I k = 0; k < job->count; k++) offsets += job->phases[k].count;
  return offsets;
}

/* Entries of scratch memory that a thread needs: masks, rows and Gram matrices of `room` columns, and an image. */
static I entries_of(const pixel_job *job) {
  I rows = offsets_of(job) + HIGH, most = image_entries(job->g, job->width);
  for (I k = 0; k < job->count; k++) {
    I entries = image_entries(&job->phases[k].images, job->width);
    most = entries > most ? entries : most;
    rows += pixels_of(&job->phases[k].images, job->width) + HIGH;
  }
  return rows * job->room + most;
}

static void pixel_units(I low, I high, void *given) {
  const pixel_job *job = given;
  uint32_t thread = 0;
  job->thread(&thread);
  REAL *masks = job->scratch + thread * entries_of(job), *rest = masks + offsets_of(job) * job->room;
  mask_columns(job, masks);
  for (I unit = low; unit < high; unit++) {
    double reach[2];
    REAL *out = job->out + 3 * unit;
    out[0] = of_pixels(job, unit, masks, rest, reach), out[1] = reach[0], out[2] = reach[1];
  }
}

/* Rows of all images are zero-padded to the longest. */
static pixel_job job_of(const phase *phases, I count, const source *g) {
  pixel_job job = {.phases = phases, .count = count, .g = g, .width = g->columns};
  for (I k = 0; k < count; k++)
    job.width = phases[k].images.columns > job.width ? phases[k].images.columns : job.width;
  job.positions = job.room = pixels_of(g, job.width);
  for (I k = 0; k < count; k++) {
    I pixels = pixels_of(&phases[k].images, job.width);
    job.room = pixels > job.room ? pixels : job.room;
  }
  job.room = (job.room / LANES + 2) * LANES;
  return job;
}

/* Entries of scratch memory for each thread. */
I pixel_scratch(const phase *phases, I count, const source *g) {
  pixel_job job = job_of(phases, count, g);
  return entries_of(&job);
}

/* `scratch`: zeros, because unwritten entries are multiplied by zero. `out`: squared norms and both parts of reaches,
   [samples, 3]. */
void pixel_norms(const phase *phases, I count, const source *g, for_each *parallel, index_of_thread *thread, I samples,
                 REAL *scratch, double beside_inputs, double beside_outputs, REAL *out) {
  pixel_job job = job_of(phases, count, g);
  double work = (double)job.positions * job.positions * g->features;
  job.thread = thread, job.scratch = scratch, job.out = out;
  job.lost[0] = beside_inputs, job.lost[1] = beside_outputs;
  for (I k = 0; k < count; k++) {
    double pixels = pixels_of(&phases[k].images, job.width);
    work += pixels * pixels * phases[k].images.features;
  }
  each(parallel, samples, 0.5 * work, pixel_units, &job);
}

typedef struct {
  const REAL *pixels, *g;
  const I *sizes;
  double lost[2];
  REAL *out;
} reach_job;

static void patch_units(I low, I high, void *given) {
  const reach_job *job = given;
  const I *n = job->sizes, *m = n + 2, *kernel = n + 4, *stride = n + 6, *padding = n + 8, *dilation = n + 10;
  for (I unit = low; unit < high; unit++) {
    const REAL *pixels = job->pixels + unit * n[0] * n[1], *g = job->g + unit * m[0] * m[1];
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

/* Reaches of convolutions [samples, 2], from norms of pixels [samples, rows, columns] of images and of the output's
   gradient g. `sizes`: rows and columns of both; then two each of kernel, stride, padding, dilation. */
void patch_reaches(for_each *parallel, const REAL *pixels, const REAL *g, const I *sizes, I samples,
                   double beside_inputs, double beside_outputs, REAL *out) {
  reach_job job = {pixels, g, sizes, {beside_inputs, beside_outputs}, out};
  each(parallel, samples, 4.0 * sizes[2] * sizes[3] * sizes[4] * sizes[5], patch_units, &job);
}
