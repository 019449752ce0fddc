/* Squared per-sample norms from Gram matrices that are never in memory whole. What is computed: clipping/kernels/cpu.py.

   Compiled once for REAL = float and once for double, for the processor that it runs on. Vectors are as wide as the
   processor's; a tile of sums stays in its registers. Threads are torch's own: `parallel` is its torch_parallel_for. */

#include <stdint.h>
#include <string.h>

typedef int64_t I;

#if defined(__AVX512F__)
#define BYTES 64
#define SIDE 5 /* of a tile of inner products */
#define DEEP 4 /* vectors to a row of a tile of pixels */
#elif defined(__AVX__)
#define BYTES 32
#define SIDE 3
#define DEEP 2
#elif defined(__aarch64__)
#define BYTES 16
#define SIDE 5
#define DEEP 4
#else
#define BYTES 16
#define SIDE 3
#define DEEP 2
#endif
#define TILE (SIDE * SIDE)
#define HIGH 6 /* rows of a tile of pixels */
#define LANES (BYTES / SIZE) /* SIZE: bytes of a REAL */
#define TREES ((TILE + LANES - 1) / LANES)
#define PANEL 393216 /* bytes of positions that stay in a second-level cache while others pass by */
#define WORK 200000 /* multiplications that are worth another thread */

#define UNROLL _Pragma("GCC unroll 64")
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* with all registers to itself */

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

static void each(for_each *parallel, I units, double multiplications, body *run, void *job) {
  I grain = multiplications < WORK ? (I)(WORK / (multiplications + 1)) + 1 : 1;
  parallel(0, units, grain, run, job);
}

/* ---- what is read once, and so takes as long as memory does ---- */

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

/* ---- sums of the lanes of LANES vectors at once: halves of two vectors are added, until one lane is left of each ---- */

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

/* Where the sum of the i-th vector is found: the bits of i in reverse. */
INLINE int lane(int i) {
  int found = 0;
  UNROLL for (int h = 1; h < LANES; h *= 2) found = 2 * found + ((i & h) != 0);
  return found;
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

/* ---- gram_norm: positions before features, so that inner products are along memory ---- */

typedef struct {
  const REAL *x;
  I features, sample, position; /* strides, in entries */
} rows;

typedef struct {
  rows a;
  const rows *gradients;
  I count, positions, parts;
  REAL *out; /* [n, parts] */
  I entries; /* of one position, in a and all of its gradients */
} gram_job;

/* Products of the rows from t on with those from s on, SIDE of each, not yet summed over lanes. Behind the end there is
   the last row again, which `of_positions` gives no weight. */
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

/* The part of a sample's sum in which t is in [start, stop), of the lower triangle with the diagonal. */
static double of_positions(const gram_job *job, I sample, I start, I stop) {
  I end = job->positions, panel = PANEL / (job->entries * (I)sizeof(REAL)) / SIDE * SIDE;
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
            if (t + i / SIDE >= end || s + i % SIDE >= end) inputs[i / LANES * LANES + lane(i % LANES)] = 0;
        for (I k = 0; k < job->count; k++) {
          dots(&job->gradients[k], sample, t, s, end, tile);
          UNROLL for (int i = 0; i < TILE; i++)
            part[i % 4] += tile[i] * inputs[i / LANES * LANES + lane(i % LANES)];
        }
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
    part = part % 2 ? job->parts - 1 - part / 2 : part / 2; /* short ones beside long ones: they share a thread */
    start = part * step;
    I stop = start + step < job->positions ? start + step : job->positions;
    job->out[unit] = start < stop ? of_positions(job, unit / job->parts, start, stop) : 0;
  }
}

/* `gradients`: x, features and both strides of each, as in `rows`. */
void gram_norm(for_each *parallel, const REAL *a, const I *strides, I samples, I positions, I inputs,
               const I *gradients, I count, I parts, REAL *out) {
  gram_job job = {{a, inputs, strides[0], strides[1]}, (const rows *)gradients, count, positions, parts, out, inputs};
  for (I k = 0; k < count; k++) job.entries += job.gradients[k].features;
  each(parallel, samples * parts, 0.5 * positions * positions * job.entries / parts, gram_units, &job);
}

/* ---- pixel_gram_norm: features before positions, as an image lies in memory ---- */

typedef struct {
  const REAL *x;
  I pixels, count; /* offsets */
  const I *offsets; /* of a row and of a column, of each */
} phase;

typedef struct {
  const phase *phases;
  const REAL *g;
  I count, channels, outputs, positions, width, room;
  REAL *scratch;
  REAL *out; /* [n] */
  index_of_thread *thread;
} pixel_job;

/* Features of one sample, [features, pixels]. The last ones are copied: what is read behind them must be there. */
typedef struct {
  const REAL *x, *copied;
  I features, pixels, body; /* features that are not copied */
} image;

static image image_of(const REAL *x, I features, I pixels, REAL *copy) {
  I copies = (LANES + HIGH + pixels - 1) / pixels;
  if (copies > features) copies = features;
  I body = features - copies;
  memcpy(copy, x + body * pixels, copies * pixels * sizeof(REAL));
  return (image){x, copy, features, pixels, body};
}

/* Inner products of pixels [s, s + HIGH) with `deep` vectors of them from t on. */
INLINE void tile(const image *of, I s, I t, REAL *out, I pitch, int deep) {
  vector found[HIGH * DEEP], w[DEEP];
  UNROLL for (int i = 0; i < HIGH * deep; i++) found[i] = (vector){0};
  for (I c = 0; c < of->features; c++) {
    const REAL *row = c < of->body ? of->x + c * of->pixels : of->copied + (c - of->body) * of->pixels;
    UNROLL for (int j = 0; j < deep; j++) w[j] = load(row + t + j * LANES);
    UNROLL for (int i = 0; i < HIGH; i++) UNROLL for (int j = 0; j < deep; j++) found[i * deep + j] += w[j] * row[s + i];
  }
  UNROLL for (int i = 0; i < HIGH; i++)
    UNROLL for (int j = 0; j < deep; j++) store(out + i * pitch + t + j * LANES, found[i * deep + j]);
}

APART void broad(const image *of, I s, I t, REAL *out, I pitch) { tile(of, s, t, out, pitch, DEEP); }
APART void narrow(const image *of, I s, I t, REAL *out, I pitch) { tile(of, s, t, out, pitch, 1); }

/* HIGH rows of the lower triangle of a pixel Gram matrix; what is written above the diagonal means nothing. */
static void triangle(const image *of, I s, REAL *out, I pitch) {
  I end = s + HIGH < of->pixels ? s + HIGH : of->pixels, t = 0;
  for (; t + (DEEP - 1) * LANES < end; t += DEEP * LANES) broad(of, s, t, out, pitch);
  for (; t < end; t += LANES) narrow(of, s, t, out, pitch);
}

/* 1 where what a column of the output reads is in its row, for each offset of each phase. */
static void mask_columns(const pixel_job *job, REAL *masks) {
  for (I k = 0; k < job->count; k++)
    for (I o = 0; o < job->phases[k].count; o++, masks += job->room)
      for (I t = 0; t < job->positions; t++) {
        I column = t % job->width + job->phases[k].offsets[2 * o + 1];
        masks[t] = column >= 0 && column < job->width;
      }
}

/* <the sum of all shifts of the pixel Gram matrices, the Gram matrix of g> of one sample. */
static double of_pixels(const pixel_job *job, I sample, const REAL *masks, REAL *scratch) {
  I positions = job->positions, pitch = job->room;
  REAL *copy = scratch, *row = copy + 2 * pitch, *grams = row + HIGH * pitch, *gram = grams;
  double total = 0;
  for (I k = 0; k < job->count; k++) {
    I pixels = job->phases[k].pixels;
    image x = image_of(job->phases[k].x + sample * job->channels * pixels, job->channels, pixels, copy);
    for (I s = 0; s < pixels; s += HIGH) triangle(&x, s, gram + s * pitch, pitch);
    gram += (pixels + HIGH) * pitch;
  }
  image g = image_of(job->g + sample * job->outputs * positions, job->outputs, positions, copy);
  for (I start = 0; start < positions; start += HIGH) {
    triangle(&g, start, row, pitch);
    for (I t = start; t < start + HIGH && t < positions; t++) {
      REAL *of = row + (t - start) * pitch;
      const REAL *mask = masks;
      vector found = {0};
      for (I s = 0; s < t; s++) of[s] *= 2; /* for the upper triangle */
      for (I s = t + 1; s < (t / LANES + 2) * LANES; s++) of[s] = 0;
      gram = grams;
      for (I k = 0; k < job->count; gram += (job->phases[k].pixels + HIGH) * pitch, k++)
        for (I o = 0; o < job->phases[k].count; o++, mask += pitch) {
          I shift = job->phases[k].offsets[2 * o] * job->width + job->phases[k].offsets[2 * o + 1];
          if (t + shift < 0 || t + shift >= job->phases[k].pixels || !mask[t]) continue;
          const REAL *pixels = gram + (t + shift) * pitch + shift;
          for (I s = shift < 0 ? -shift : 0; s <= t; s += LANES)
            found += load(of + s) * load(mask + s) * load(pixels + s);
        }
      total += sum(found);
    }
  }
  return total;
}

static void pixel_units(I low, I high, void *given) {
  const pixel_job *job = given;
  uint32_t thread = 0;
  I rows = 2 + HIGH, offsets = 0;
  job->thread(&thread);
  for (I k = 0; k < job->count; k++) rows += job->phases[k].pixels + HIGH, offsets += job->phases[k].count;
  REAL *masks = job->scratch + thread * (rows + offsets) * job->room;
  mask_columns(job, masks);
  for (I unit = low; unit < high; unit++) job->out[unit] = of_pixels(job, unit, masks, masks + offsets * job->room);
}

/* Rows of scratch memory that each thread needs beside one for each offset and each pixel of all phases. */
I scratch_rows(I phases) { return 2 + HIGH + phases * HIGH; }

/* Entries of such a row. */
I scratch_room(I pixels) { return (pixels / LANES + 2) * LANES; }

/* `phases`: x, pixels, the number and the address of the offsets of each, as in `phase`; an image's rows are as long as
   those of the output, `width`. `room`: of the larger of `positions` and all pixels. `scratch`: zeros; what it holds
   before it is written is multiplied by zero. */
void pixel_gram_norm(for_each *parallel, index_of_thread *thread, const I *phases, I count, const REAL *g, I samples,
                     I channels, I outputs, I positions, I width, I room, REAL *scratch, REAL *out) {
  pixel_job job = {(const phase *)phases, g, count, channels, outputs, positions, width, room, scratch, out, thread};
  double pixels = 0;
  for (I k = 0; k < count; k++) pixels += (double)job.phases[k].pixels * job.phases[k].pixels;
  each(parallel, samples, 0.5 * (pixels * channels + (double)positions * positions * outputs), pixel_units, &job);
}
