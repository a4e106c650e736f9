/* Gumbel noise that belongs to the token, and the lazy argmax over z / T + noise.

   Ids stand in a fixed tree: 64 to a block, 64 blocks to a superblock. What is drawn is a = exp(-largest noise below
   a node): E / 4096 for a superblock, E exponential; the child that holds the largest is uniform and keeps its
   parent's a, any other child of n ids has a + E / n (Maddison, Tarlow & Minka 2014, top-down). Noise is -log(a).
   Children never have a smaller a and log is monotone, so z_max / T + noise of a node bounds all below it. Every E
   and position is a function of (seed, key, step, node) alone, whatever the vocabulary, the logits or the order. */

enum { FANOUT = BLOCK, SUPERBLOCK = FANOUT * FANOUT, MAX_SUPERBLOCKS = SAMPLE_MAX_VOCAB / SUPERBLOCK };

/* What a domain's 64 random bits are for; a root's bits are items 2s (E) and 2s + 1 (position). */
enum { DOMAIN_ROOT, DOMAIN_BLOCK, DOMAIN_ID, DOMAIN_BLOCK_POSITION };

INLINE uint32_t position_of(uint64_t bits) { return (uint32_t)(bits >> 58); }

/* Sixteen nodes anywhere in the tree. */
struct nodes {
  double a[LANES];
  uint32_t position[LANES]; /* which child holds the largest noise */
};

static void root_nodes(struct nodes *roots, size_t first, const struct philox_key *key) {
  uint64_t r[32];
  random_bits32(r, (uint32_t)(2 * first), DOMAIN_ROOT, key);
  for (size_t i = 0; i < LANES; i++) {
    roots->a[i] = exponential1(r[2 * i]) * (1.0 / SUPERBLOCK);
    roots->position[i] = position_of(r[2 * i + 1]);
  }
}

/* a of children, given a of each one's parent and which child of its parent is the largest; ids: in a child */
static void child_nodes(double a[LANES], const double parent[LANES], const uint32_t largest[LANES],
                        const uint32_t child[LANES], uint32_t domain, double ids, const struct philox_key *key) {
  uint64_t r[LANES];
  random_bits16(r, child, domain, key);
  for (size_t i = 0; i < LANES; i++) {
    double other = parent[i] + exponential1(r[i]) * (1.0 / ids);
    a[i] = child[i] % FANOUT == largest[i] ? parent[i] : other;
  }
}

static void block_nodes(struct nodes *blocks, const double parent[LANES], const uint32_t largest[LANES],
                        const uint32_t block[LANES], const struct philox_key *key) {
  uint64_t r[LANES];
  child_nodes(blocks->a, parent, largest, block, DOMAIN_BLOCK, FANOUT, key);
  random_bits16(r, block, DOMAIN_BLOCK_POSITION, key);
  for (size_t i = 0; i < LANES; i++) {
    blocks->position[i] = position_of(r[i]);
  }
}

static void noise_of(double noise[LANES], const double a[LANES]) {
  for (size_t i = 0; i < LANES; i++) {
    noise[i] = -log64_1(a[i]);
  }
}

INLINE void challenge(struct winner *best, float z, double temperature, double noise, size_t id) {
  struct winner w = scored(z, temperature, noise, id);
  if (beats(w, *best)) {
    *best = w;
  }
}

/* ---- few ids: each one's own way down ---- */

enum { FEW = 64 };

/* Noise of sixteen ids. */
static void noise_of_ids(double noise[LANES], const uint32_t id[LANES], const struct philox_key *key) {
  uint32_t block[LANES], item[LANES], largest[LANES];
  uint64_t r[LANES];
  double a[LANES];
  struct nodes blocks;
  for (size_t l = 0; l < LANES; l++) {
    block[l] = id[l] / FANOUT;
    item[l] = id[l] / SUPERBLOCK * 2;
  }
  random_bits16(r, item, DOMAIN_ROOT, key);
  for (size_t l = 0; l < LANES; l++) {
    a[l] = exponential1(r[l]) * (1.0 / SUPERBLOCK);
    item[l]++;
  }
  random_bits16(r, item, DOMAIN_ROOT, key);
  for (size_t l = 0; l < LANES; l++) {
    largest[l] = position_of(r[l]);
  }
  block_nodes(&blocks, a, largest, block, key);
  child_nodes(a, blocks.a, blocks.position, id, DOMAIN_ID, 1, key);
  noise_of(noise, a);
}

static struct winner best_of_few(const float *z, const uint32_t *id, size_t count, double temperature,
                                 const struct philox_key *key) {
  struct winner best = {-INFINITY, 0.0, 0, -INFINITY};
  for (size_t i = 0; i < count; i += LANES) {
    size_t lanes = min_size(LANES, count - i);
    uint32_t ids[LANES];
    double noise[LANES];
    for (size_t l = 0; l < LANES; l++) {
      ids[l] = id[i + min_size(l, lanes - 1)];
    }
    noise_of_ids(noise, ids, key);
    for (size_t l = 0; l < lanes; l++) {
      challenge(&best, z[i + l], temperature, noise[l], ids[l]);
    }
  }
  return best;
}

/* ---- many: best bound first, opening only what can win ---- */

/* Candidates among the 64 children of a node whose bound with their parent's noise reaches the best. A bound that
   equals it counts: the tie may be lower. */
struct survivors {
  uint32_t child[FANOUT + LANES];
  size_t count;
};

static void find_survivors(struct survivors *s, const float z[FANOUT], size_t count, size_t first, double noise,
                           double temperature, double best) {
  double bound[FANOUT];
  before_noise_n(bound, z, FANOUT, temperature);
  for (size_t i = 0; i < FANOUT; i++) {
    bound[i] += noise;
  }
  s->count = 0;
  for (size_t i = 0; i < count; i++) {
    s->child[s->count] = (uint32_t)(first + i);
    s->count += bound[i] >= best && bound[i] > -INFINITY;
  }
  for (size_t i = 0; i < LANES; i++) { /* whole vectors of nodes that exist */
    s->child[s->count + i] = (uint32_t)first;
  }
}

struct draw {
  const struct judged *row;
  struct prefix from; /* what may win */
  double temperature;
  const struct philox_key *key;
  struct winner best;      /* or, where several are wanted, the one to beat */
  struct winners *several; /* NULL: only the best is wanted */
};

static void open_block(struct draw *d, size_t block, double a_block, uint32_t largest) {
  float room[BLOCK];
  const float *z = block_of(d->row, block, room);
  struct survivors ids;
  double parent[LANES], a[LANES], noise[LANES];
  uint32_t position[LANES];
  for (size_t i = 0; i < LANES; i++) {
    parent[i] = a_block;
    position[i] = largest;
  }
  find_survivors(&ids, z, BLOCK, block * BLOCK, -log64_1(a_block), d->temperature, d->best.hi);
  for (size_t i = 0; i < ids.count; i += LANES) {
    child_nodes(a, parent, position, ids.child + i, DOMAIN_ID, 1, d->key);
    noise_of(noise, a);
    for (size_t l = i; l < min_size(i + LANES, ids.count); l++) {
      size_t id = ids.child[l];
      if (is_in(d->from, z[id % BLOCK], id)) {
        struct winner w = scored(z[id % BLOCK], d->temperature, noise[l - i], id);
        if (beats(w, d->best)) {
          d->best = d->several ? enter(d->several, w, d->best) : w;
        }
      }
    }
  }
}

INLINE size_t highest(const double *score, size_t n) {
  size_t best = 0;
  for (size_t i = 1; i < n; i++) {
    best = score[i] > score[best] ? i : best;
  }
  return best;
}

static void open_superblock(struct draw *d, size_t superblock, double a_root, uint32_t largest) {
  size_t first = superblock * FANOUT, count = min_size(FANOUT, d->row->blocks - first);
  const float *maxima = d->row->maxima + first;
  struct survivors blocks;
  struct nodes nodes[FANOUT / LANES + 1];
  double score[FANOUT + LANES], parent[LANES], noise[LANES];
  float z[FANOUT];
  uint32_t position[LANES];
  for (size_t i = 0; i < FANOUT; i++) {
    z[i] = i < count && maxima[i] >= d->from.value ? maxima[i] : -INFINITY;
  }
  for (size_t i = 0; i < LANES; i++) {
    parent[i] = a_root;
    position[i] = largest;
  }
  find_survivors(&blocks, z, FANOUT, first, -log64_1(a_root), d->temperature, d->best.hi);
  for (size_t i = 0; i < blocks.count; i += LANES) {
    block_nodes(&nodes[i / LANES], parent, position, blocks.child + i, d->key);
    noise_of(noise, nodes[i / LANES].a);
    for (size_t l = 0; l < LANES; l++) {
      score[i + l] = before_noise(z[blocks.child[i + l] - first], d->temperature) + noise[l];
    }
  }
  while (blocks.count) {
    size_t i = highest(score, blocks.count);
    if (score[i] == -INFINITY || score[i] < d->best.hi) {
      return;
    }
    open_block(d, blocks.child[i], nodes[i / LANES].a[i % LANES], nodes[i / LANES].position[i % LANES]);
    score[i] = -INFINITY;
  }
}

/* The best of z_i / T + G_i over the ids in `from`, or the several best. */
static struct winner gumbel_best(const struct judged *row, struct prefix from, double temperature,
                                 const struct philox_key *key, struct winners *several) {
  struct nodes roots[MAX_SUPERBLOCKS / LANES];
  double score[MAX_SUPERBLOCKS], noise[LANES];
  size_t count = (row->blocks + FANOUT - 1) / FANOUT;
  struct draw d = {row, from, temperature, key, {-INFINITY, 0.0, row->n, -INFINITY}, several};
  for (size_t s = 0; s < count; s++) {
    if (s % LANES == 0) {
      root_nodes(&roots[s / LANES], s, key);
      noise_of(noise, roots[s / LANES].a);
    }
    vf v[4];
    row_load64(v, row->maxima, s * FANOUT, row->blocks, DTYPE_F32, -INFINITY);
    float max = max_across64(v);
    score[s] = max >= from.value ? before_noise(max, temperature) + noise[s % LANES] : -INFINITY;
  }
  for (size_t s = highest(score, count); score[s] > -INFINITY && score[s] >= d.best.hi; s = highest(score, count)) {
    open_superblock(&d, s, roots[s / LANES].a[s % LANES], roots[s / LANES].position[s % LANES]);
    score[s] = -INFINITY;
  }
  return d.best;
}

/* argmax of z_i / T + G_i over the ids in `from`, of which there is one */
static struct winner gumbel_argmax(const struct judged *row, struct prefix from, double temperature,
                                   const struct philox_key *key) {
  return gumbel_best(row, from, temperature, key, NULL);
}

/* The noise of every id, the long way: what the lazy tree must agree with. */
static void gumbel(const struct noise_args *args, void *scratch) {
  (void)scratch;
  const struct philox_key key = {args->seed, args->key, (uint32_t)args->step};
  double *out = args->out.ptr, noise[LANES];
  uint32_t id[LANES];
  for (size_t i = 0; i < (size_t)args->cols; i += LANES) {
    for (size_t l = 0; l < LANES; l++) {
      id[l] = (uint32_t)((size_t)args->first + i + l);
    }
    noise_of_ids(noise, id, &key);
    memcpy(out + i, noise, min_size(LANES, (size_t)args->cols - i) * sizeof *out);
  }
}
