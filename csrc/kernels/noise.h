/* Gumbel noise that belongs to the token, and the lazy argmax over z / T + noise.

   Ids stand in a fixed tree: 64 to a block, 64 blocks to a superblock. What is drawn is a = exp(-largest noise below
   a node): E / 4096 for a superblock, E exponential; the child that holds the largest is uniform and keeps its
   parent's a, any other child of n ids has a + E / n (Maddison, Tarlow & Minka 2014, top-down). Noise is -log(a).
   Children never have a smaller a and log is monotone, so z_max / T + noise of a node bounds all below it. Every E
   and position is a function of (seed, key, step, node) alone, whatever the vocabulary, the logits or the order. */

enum { FANOUT = BLOCK, SUPERBLOCK = FANOUT * FANOUT, MAX_SUPERBLOCKS = SAMPLE_MAX_VOCAB / SUPERBLOCK };

INLINE struct philox_key key_of(const struct span *params, int64_t row) {
  const struct sample_params *p = (const struct sample_params *)params->ptr + row;
  return (struct philox_key){p->seed, p->key, (uint32_t)p->step};
}

/* What a domain's 64 random bits are for; a root's bits are items 2s (E) and 2s + 1 (position). */
enum { DOMAIN_ROOT, DOMAIN_BLOCK, DOMAIN_ID, DOMAIN_BLOCK_POSITION };

INLINE uint32_t position_of(uint64_t bits) { return (uint32_t)(bits >> 58); }

/* Sixteen superblocks anywhere: a of each, and which of its blocks holds its largest noise. */
static void root_nodes(double a[LANES], uint32_t largest[LANES], const uint32_t superblock[LANES],
                       const struct philox_key *key) {
  uint64_t r[LANES], position[LANES];
  random_pairs16(r, position, superblock, DOMAIN_ROOT, key);
  for (size_t i = 0; i < LANES; i++) {
    a[i] = exponential1(r[i]) * (1.0 / SUPERBLOCK);
    largest[i] = position_of(position[i]);
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

/* Which id of its block holds the block's largest noise. */
static void largest_ids(uint32_t largest[LANES], const uint32_t block[LANES], const struct philox_key *key) {
  uint64_t r[LANES];
  random_bits16(r, block, DOMAIN_BLOCK_POSITION, key);
  for (size_t i = 0; i < LANES; i++) {
    largest[i] = position_of(r[i]);
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
  uint32_t block[LANES], superblock[LANES], largest[LANES];
  double root[LANES], parent[LANES], a[LANES];
  for (size_t l = 0; l < LANES; l++) {
    block[l] = id[l] / FANOUT;
    superblock[l] = id[l] / SUPERBLOCK;
  }
  root_nodes(root, largest, superblock, key);
  child_nodes(parent, root, largest, block, DOMAIN_BLOCK, FANOUT, key);
  largest_ids(largest, block, key);
  child_nodes(a, parent, largest, id, DOMAIN_ID, 1, key);
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

/* Nodes whose noise is wanted, sixteen at a time: ids, or blocks with their largest logit. */
struct queue {
  uint32_t node[LANES], largest[LANES]; /* which child of its parent has the parent's noise */
  float z[LANES];
  double parent[LANES];
  size_t count;
};

struct draw {
  const struct judged *row;
  struct prefix from; /* what may win */
  double temperature;
  const struct philox_key *key;
  struct winners *several; /* NULL: only the best is wanted */
  struct winner best;      /* or, of several, the one to beat */
  struct queue ids, blocks;
};

/* 1 if that fills it. */
INLINE int enqueue(struct queue *q, uint32_t node, float z, double parent, uint32_t largest) {
  size_t l = q->count++;
  q->node[l] = node;
  q->z[l] = z;
  q->parent[l] = parent;
  q->largest[l] = largest;
  return q->count == LANES;
}

static void repeat_first(struct queue *q) {
  for (size_t l = q->count; l < LANES; l++) {
    q->node[l] = q->node[0];
    q->z[l] = q->z[0];
    q->parent[l] = q->parent[0];
    q->largest[l] = q->largest[0];
  }
}

/* No logit below this can reach the best score with so much noise; a little low, which costs a look and nothing else. A
   score that equals the best counts: its id may be lower. */
static float needed(const struct draw *d, double noise) {
  double y = d->best.hi - noise, z = d->temperature > 0.0 ? y * d->temperature : exp64_1(y);
  z -= (fabs(d->best.hi) + fabs(noise)) * d->temperature * 0x1p-40 + fabs(z) * 0x1p-22 + 0x1p-140;
  float least = d->best.hi == -INFINITY || z < -FLT_MAX ? -FLT_MAX : (float)z;
  return least > d->from.value ? least : d->from.value > -FLT_MAX ? d->from.value : -FLT_MAX;
}

static void challenge_ids(struct draw *d) {
  struct queue *q = &d->ids;
  double a[LANES], noise[LANES];
  repeat_first(q);
  child_nodes(a, q->parent, q->largest, q->node, DOMAIN_ID, 1, d->key);
  noise_of(noise, a);
  for (size_t l = 0; l < q->count; l++) {
    struct winner w = scored(q->z[l], d->temperature, noise[l], q->node[l]);
    if (beats(w, d->best)) {
      d->best = d->several ? enter(d->several, w, d->best) : w;
    }
  }
  q->count = 0;
}

INLINE void consider_id(struct draw *d, float z, size_t id, double parent, uint32_t largest) {
  if (is_in(d->from, z, id) && enqueue(&d->ids, (uint32_t)id, z, parent, largest)) {
    challenge_ids(d);
  }
}

static void open_block(struct draw *d, size_t block, double a, double noise, uint32_t largest) {
  float room[BLOCK];
  const float *z = block_of(d->row, block, room);
  if (d->best.hi == -INFINITY && !d->several) { /* the two likeliest first: they spare most of the others */
    size_t likely[2] = {first_equal(z, BLOCK, DTYPE_F32, d->row->maxima[block]) % BLOCK, largest};
    for (size_t i = 0; i < 2; i++) {
      consider_id(d, z[likely[i]], block * BLOCK + likely[i], a, largest);
    }
    if (d->ids.count) {
      challenge_ids(d);
    }
  }
  for (uint64_t hits = reaching64(z, needed(d, noise)); hits; hits &= hits - 1) {
    size_t i = (size_t)__builtin_ctzll(hits);
    consider_id(d, z[i], block * BLOCK + i, a, largest);
  }
}

INLINE size_t highest(const double *score, size_t n) {
  size_t best = 0;
  for (size_t i = 1; i < n; i++) {
    best = score[i] > score[best] ? i : best;
  }
  return best;
}

static void open_blocks(struct draw *d) {
  struct queue q = d->blocks;
  double a[LANES], noise[LANES], score[LANES];
  uint32_t largest[LANES];
  d->blocks.count = 0;
  for (size_t l = 0; l < q.count; l++) {
    expect_block(d->row, q.node[l]);
  }
  repeat_first(&q);
  child_nodes(a, q.parent, q.largest, q.node, DOMAIN_BLOCK, FANOUT, d->key);
  largest_ids(largest, q.node, d->key);
  noise_of(noise, a);
  for (size_t l = 0; l < LANES; l++) {
    score[l] = before_noise(q.z[l], d->temperature) + noise[l];
  }
  for (size_t i = highest(score, q.count); score[i] > -INFINITY && score[i] >= d->best.hi;
       i = highest(score, q.count)) {
    open_block(d, q.node[i], a[i], noise[i], largest[i]);
    score[i] = -INFINITY;
  }
}

static void open_superblock(struct draw *d, size_t superblock, double a, double noise, uint32_t largest) {
  size_t first = superblock * FANOUT;
  float maxima[FANOUT];
  uint64_t seen = 0;
  vf v[4];
  row_load64(v, d->row->maxima, first, d->row->blocks, DTYPE_F32, -INFINITY);
  for (size_t i = 0; i < 4; i++) {
    v_store(maxima + LANES * i, v[i]);
  }
  for (int rest = d->best.hi > -INFINITY; rest < 2; rest++) { /* without a best: the dozen likeliest first */
    uint64_t hits = reaching64(maxima, needed(d, noise)) & ~seen;
    if (!rest) {
      hits &= reaching64(maxima, bound_reached(maxima, FANOUT, 8, LANES - 1)) | (uint64_t)1 << largest;
    }
    for (seen |= hits; hits; hits &= hits - 1) {
      size_t i = (size_t)__builtin_ctzll(hits);
      if (is_in(d->from, maxima[i], (first + i) * BLOCK) && /* else ties that all stand behind its end */
          enqueue(&d->blocks, (uint32_t)(first + i), maxima[i], a, largest)) {
        open_blocks(d);
      }
    }
    if (!rest && d->blocks.count) {
      open_blocks(d);
    }
  }
}

/* With a winner to beat, little else is opened. */
static void begin_at(struct draw *d, size_t id) {
  float room[BLOCK], z = block_of(d->row, id / BLOCK, room)[id % BLOCK];
  double noise[LANES];
  uint32_t ids[LANES];
  if (!is_in(d->from, z, id)) {
    return;
  }
  for (size_t l = 0; l < LANES; l++) {
    ids[l] = (uint32_t)id;
  }
  noise_of_ids(noise, ids, d->key);
  d->best = scored(z, d->temperature, noise[0], id);
}

/* The best of z_i / T + G_i over the ids in `from`, or several of the best. */
static struct winner gumbel_best(const struct judged *row, struct prefix from, double temperature,
                                 const struct philox_key *key, struct winners *several) {
  double a[MAX_SUPERBLOCKS], noise[MAX_SUPERBLOCKS], score[MAX_SUPERBLOCKS];
  uint32_t largest[MAX_SUPERBLOCKS];
  size_t count = (row->blocks + FANOUT - 1) / FANOUT;
  struct draw d = {row,          from,        temperature, key, several, {-INFINITY, 0.0, row->n, -INFINITY},
                   {.count = 0}, {.count = 0}};
  if (row->likely >= 0 && !several) {
    begin_at(&d, (size_t)row->likely);
  }
  for (size_t s = 0; s < count; s += LANES) {
    uint32_t superblock[LANES];
    u_store(superblock, ids_from(s));
    root_nodes(a + s, largest + s, superblock, key);
    noise_of(noise + s, a + s);
  }
  for (size_t s = 0; s < count; s++) {
    vf v[4];
    row_load64(v, row->maxima, s * FANOUT, row->blocks, DTYPE_F32, -INFINITY);
    float max = max_across64(v);
    score[s] = is_in(from, max, s * SUPERBLOCK) ? before_noise(max, temperature) + noise[s] : -INFINITY;
  }
  for (size_t s = highest(score, count); score[s] > -INFINITY && score[s] >= d.best.hi; s = highest(score, count)) {
    open_superblock(&d, s, a[s], noise[s], largest[s]);
    score[s] = -INFINITY;
  }
  if (d.blocks.count) {
    open_blocks(&d);
  }
  if (d.ids.count) {
    challenge_ids(&d);
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
