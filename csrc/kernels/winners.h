/* Scores, and the highest of them. A score is an exact sum, kept as hi + lo (Knuth's TwoSum); ties go to the lowest id.
 */
struct winner {
  double hi, lo;
  size_t id;
  float z;
};

/* What noise is added to: z / T, or log z of probabilities, which have OF_PROBS for a temperature. */
#define OF_PROBS 0.0
static __attribute__((noinline)) double log_of_prob(float p) { return p > 0.0f ? log64_1((double)p) : -INFINITY; }
INLINE double before_noise(float z, double temperature) {
  return temperature > 0.0 ? (double)z / temperature : log_of_prob(z);
}

INLINE struct winner scored(float z, double temperature, double noise, size_t id) {
  double a = before_noise(z, temperature), hi = a + noise, t = hi - a;
  return (struct winner){hi, (a - (hi - t)) + (noise - t), id, z};
}

INLINE int beats(struct winner a, struct winner b) {
  return a.hi > b.hi || (a.hi == b.hi && (a.lo > b.lo || (a.lo == b.lo && a.id < b.id)));
}

/* The n best so far: a heap with the one to beat at its top, once there are n. */
struct winners {
  struct winner *heap;
  size_t count, n;
};

static void sift_down(struct winner *heap, size_t count, size_t at) {
  struct winner w = heap[at];
  for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
    child += child + 1 < count && beats(heap[child], heap[child + 1]);
    if (beats(heap[child], w)) {
      break;
    }
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = w;
}

static void make_heap(struct winners *all) {
  for (size_t i = all->count / 2; i-- > 0;) {
    sift_down(all->heap, all->count, i);
  }
}

/* w beats what is to be beaten. Returns what is to be beaten from now on. */
static struct winner enter(struct winners *all, struct winner w, struct winner to_beat) {
  if (all->count == all->n) {
    all->heap[0] = w;
    sift_down(all->heap, all->count, 0);
    return all->heap[0];
  }
  all->heap[all->count++] = w;
  if (all->count < all->n) {
    return to_beat;
  }
  make_heap(all);
  return all->heap[0];
}

/* Best first, which ends the heap. */
static void put_in_order(struct winners *all) {
  make_heap(all);
  for (size_t left = all->count; left > 1; left--) {
    struct winner worst = all->heap[0];
    all->heap[0] = all->heap[left - 1];
    sift_down(all->heap, left - 1, 0);
    all->heap[left - 1] = worst;
  }
}
