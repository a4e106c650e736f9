/* Gumbel noise that belongs to the token, and the lazy argmax over z / T + noise.

   Ids stand in a fixed tree: 64 to a block, 64 blocks to a superblock. What is drawn is a = exp(-largest noise below
   a node): E / 4096 for a superblock, E exponential; the child that holds the largest is uniform and keeps its
   parent's a, any other child of n ids has a + E / n (Maddison, Tarlow & Minka 2014, top-down). Noise is -log(a).
   Children never have a smaller a and log is monotone, so z_max / T + noise of a node bounds all below it. Every E
   and position is a function of (seed, key, step, node) alone, whatever the vocabulary, the logits or the order. */

enum { FANOUT = BLOCK, SUPERBLOCK = FANOUT * FANOUT, MAX_SUPERBLOCKS = SAMPLE_MAX_VOCAB / SUPERBLOCK };

/* What a domain's 64 random bits are for; a root's bits are items 2s (E) and 2s + 1 (position). */
enum { DOMAIN_ROOT, DOMAIN_BLOCK, DOMAIN_ID, DOMAIN_BLOCK_POSITION };

INLINE size_t position_of(uint64_t bits) { return bits >> 58; }

/* a of sixteen superblocks from `first` on, a multiple of 16, and which block of each holds its largest noise */
static void noise_roots16(double a[16], uint8_t position[16], size_t first, const struct philox_key *key) {
  uint64_t r[32];
  random_bits32(r, (uint32_t)(2 * first), DOMAIN_ROOT, key);
  for (size_t i = 0; i < 16; i++) {
    a[i] = exponential1(r[2 * i]) * (1.0 / SUPERBLOCK);
    position[i] = (uint8_t)position_of(r[2 * i + 1]);
  }
}

/* a of the 64 children of a node; ids is how many ids a child holds */
static void noise_children(double a[FANOUT], double parent, size_t position, size_t first, uint32_t domain, double ids,
                           const struct philox_key *key) {
  uint64_t r[FANOUT];
  random_bits32(r, (uint32_t)first, domain, key);
  random_bits32(r + 32, (uint32_t)first + 32, domain, key);
  for (size_t i = 0; i < FANOUT; i++) {
    a[i] = parent + exponential1(r[i]) * (1.0 / ids);
  }
  a[position] = parent;
}

INLINE void noise_blocks(double a[FANOUT], double root, size_t position, size_t superblock,
                         const struct philox_key *key) {
  noise_children(a, root, position, superblock * FANOUT, DOMAIN_BLOCK, FANOUT, key);
}

INLINE void noise_ids(double a[FANOUT], double parent, size_t block, const struct philox_key *key) {
  uint64_t r[32];
  random_bits32(r, (uint32_t)(block - block % 32), DOMAIN_BLOCK_POSITION, key);
  noise_children(a, parent, position_of(r[block % 32]), block * FANOUT, DOMAIN_ID, 1, key);
}

/* The best score so far; scores are exact sums, kept as hi + lo (Knuth's TwoSum). */
struct winner {
  double hi, lo;
  size_t id;
};

INLINE void challenge(struct winner *best, double z, double noise, size_t id) {
  double hi = z + noise, t = hi - z, lo = (z - (hi - t)) + (noise - t);
  if (hi > best->hi || (hi == best->hi && (lo > best->lo || (lo == best->lo && id < best->id)))) {
    *best = (struct winner){hi, lo, id};
  }
}

/* Scores of 64 nodes, rounded: an upper bound of what is below, up to that rounding, which is monotone too.
   Nodes without an allowed id score -inf. */
static void scores64(double score[FANOUT], const float *z, size_t count, const double a[FANOUT], double temperature) {
  for (size_t i = 0; i < FANOUT; i++) {
    score[i] = (double)(i < count ? z[i] : -INFINITY) / temperature - log64_1(a[i]);
  }
}

INLINE size_t highest(const double *score, size_t n) {
  size_t best = 0;
  for (size_t i = 1; i < n; i++) {
    best = score[i] > score[best] ? i : best;
  }
  return best;
}

static void open_block(struct winner *best, const float *z, size_t n, size_t block, double a_block, double temperature,
                       const struct philox_key *key) {
  double a[FANOUT], noise[FANOUT];
  size_t first = block * FANOUT, count = min_size(FANOUT, n - first);
  noise_ids(a, a_block, block, key);
  for (size_t i = 0; i < FANOUT; i++) {
    noise[i] = -log64_1(a[i]);
  }
  for (size_t i = 0; i < count; i++) {
    challenge(best, (double)z[first + i] / temperature, noise[i], first + i);
  }
}

/* Highest bound first, until none can reach the best score. A bound that equals it is opened: the tie may be lower. */
static void open_superblock(struct winner *best, const float *z, size_t n, const float *block_maxima, size_t superblock,
                            double a_root, size_t position, double temperature, const struct philox_key *key) {
  double a[FANOUT], score[FANOUT];
  size_t first = superblock * FANOUT, blocks = (n + FANOUT - 1) / FANOUT;
  noise_blocks(a, a_root, position, superblock, key);
  scores64(score, block_maxima + first, min_size(FANOUT, blocks - first), a, temperature);
  for (size_t i = highest(score, FANOUT); score[i] > -INFINITY && score[i] >= best->hi; i = highest(score, FANOUT)) {
    open_block(best, z, n, first + i, a[i], temperature, key);
    score[i] = -INFINITY;
  }
}

/* argmax of z_i / T + G_i over the ids with z_i > -inf, of which there is one */
static size_t gumbel_argmax(const float *z, size_t n, const float *block_maxima, double temperature,
                            const struct philox_key *key) {
  double a[MAX_SUPERBLOCKS], score[MAX_SUPERBLOCKS];
  uint8_t position[MAX_SUPERBLOCKS];
  size_t blocks = (n + FANOUT - 1) / FANOUT, count = (blocks + FANOUT - 1) / FANOUT;
  struct winner best = {-INFINITY, 0.0, n};
  for (size_t s = 0; s < count; s += 16) {
    noise_roots16(a + s, position + s, s, key);
  }
  for (size_t s = 0; s < count; s++) {
    vf v[4];
    row_load64(v, block_maxima, s * FANOUT, blocks, DTYPE_F32, -INFINITY);
    float max = max_across64(v);
    score[s] = (double)max / temperature - log64_1(a[s]);
  }
  for (size_t s = highest(score, count); score[s] > -INFINITY && score[s] >= best.hi; s = highest(score, count)) {
    open_superblock(&best, z, n, block_maxima, s, a[s], position[s], temperature, key);
    score[s] = -INFINITY;
  }
  return best.id;
}

/* The noise of every id, the long way: what the lazy tree must agree with. */
static void gumbel(const struct noise_args *args, void *scratch) {
  (void)scratch;
  const struct philox_key key = {args->seed, args->key, (uint32_t)args->step};
  double *out = args->out.ptr;
  size_t first = (size_t)args->first, end = first + (size_t)args->cols;
  double roots[16], blocks[FANOUT], ids[FANOUT];
  uint8_t position[16];
  for (size_t block = first / FANOUT; block * FANOUT < end; block++) {
    size_t s = block / FANOUT;
    if (block == first / FANOUT || block % FANOUT == 0) {
      noise_roots16(roots, position, s - s % 16, &key);
      noise_blocks(blocks, roots[s % 16], position[s % 16], s, &key);
    }
    noise_ids(ids, blocks[block % FANOUT], block, &key);
    for (size_t i = 0; i < FANOUT; i++) {
      size_t id = block * FANOUT + i;
      if (id >= first && id < end) {
        out[id - first] = -log64_1(ids[i]);
      }
    }
  }
}
