/* pixel_gram_norm. Features come before positions, as an image lies in memory: HIGH pixels meet vectors of others. */

#include "shared.h"

#define HIGH 6
#define DEEP (REGISTERS == 32 ? 4 : 2) /* vectors */
#define COPY 4 /* rows of scratch memory for what `image_of` copies */

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
  memset(copy + copies * pixels, 0, (LANES + HIGH) * sizeof(REAL)); /* nothing of the sample before, finite or not */
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
  REAL *copy = scratch, *row = copy + COPY * pitch, *grams = row + HIGH * pitch, *gram = grams;
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
  I rows = COPY + HIGH, offsets = 0;
  job->thread(&thread);
  for (I k = 0; k < job->count; k++) rows += job->phases[k].pixels + HIGH, offsets += job->phases[k].count;
  REAL *masks = job->scratch + thread * (rows + offsets) * job->room;
  mask_columns(job, masks);
  for (I unit = low; unit < high; unit++) job->out[unit] = of_pixels(job, unit, masks, masks + offsets * job->room);
}

/* Rows of scratch memory that each thread needs beside one for each offset and each pixel of all phases. */
I scratch_rows(I phases) { return COPY + HIGH + phases * HIGH; }

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
