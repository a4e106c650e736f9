/* Runs the calls that record.py wrote on one ISA's table and compares every byte they leave.

   All memory a kernel may touch lies against a page it may not: once ending at one, once beginning behind one, with
   poison on the open side. No Python, no library but libc, so that it runs where only a static program can. */
#define _GNU_SOURCE
#include "host.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, POISON = 0xA5, SPAN_LIMIT = 32, ARGS_LIMIT = 4096 };

/* The file, as record.py writes it: a head, calls, contents. Every number is int64, every part a multiple of 8 bytes.
 */
struct head {
  char magic[8];
  int64_t calls, contents, largest; /* how many; where these start in the file; bytes of the largest region */
};
struct call {
  char operation[32], label[96];
  int64_t args_bytes, spans, regions;
};
struct place {
  int64_t region, offset; /* region -1: the span is NULL */
};
struct region {
  int64_t bytes, before, after; /* the last two from the start of the contents */
};

/* Memory with an untouchable page on either side. */
struct slot {
  unsigned char *start, *end;
};
enum placement { AT_END, AT_START, PLACEMENTS };
static const char *const placement_names[] = {"ending at a guard page", "beginning behind a guard page"};

static unsigned char poison[PAGE];
static struct slot slots[SPAN_LIMIT + 1]; /* the last is scratch */
static const struct call *running;
static int64_t running_bytes[SPAN_LIMIT + 1];
static enum placement running_placement;

static void fail(const char *message) {
  fprintf(stderr, "replay: %s\n", message);
  exit(2);
}

static struct slot make_slot(size_t bytes) {
  size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
  unsigned char *p = mmap(NULL, whole + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED || mprotect(p + PAGE, whole, PROT_READ | PROT_WRITE)) {
    fail("no memory");
  }
  return (struct slot){p + PAGE, p + PAGE + whole};
}

static const char *read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) {
    fail("cannot read the recording");
  }
  long size = ftell(file);
  rewind(file);
  char *data = malloc((size_t)size);
  if (!data || fread(data, 1, (size_t)size, file) != (size_t)size || memcmp(data, "LANEWISE", 8)) {
    fail("not a recording");
  }
  fclose(file);
  return data;
}

static int operation_number(const char *name) {
  static const char *const names[] = {
#define KERNEL(group, name, args, scratch_bytes) #name,
#include "kernels.def"
#undef KERNEL
  };
  for (int i = 0; i < OP_COUNT; i++) {
    if (!strcmp(names[i], name)) {
      return i;
    }
  }
  fail("unknown operation");
  return -1;
}

static const struct isa_table *find_table(const char *isa) {
  for (int i = 0; lanewise_tables[i]; i++) {
    if (!strcmp(lanewise_tables[i]->name, isa)) {
      return lanewise_tables[i];
    }
  }
  fail("this build has no such ISA");
  return NULL;
}

static unsigned char *region_start(const struct slot *slot, int64_t bytes) {
  return running_placement == AT_END ? slot->end - bytes : slot->start;
}

/* The open side of a region: at most a page of what lies before its start, or behind its end. */
static struct slot open_side(const struct slot *slot, int64_t bytes) {
  unsigned char *start = region_start(slot, bytes), *end = start + bytes;
  if (running_placement == AT_END) {
    return (struct slot){start - slot->start > PAGE ? start - PAGE : slot->start, start};
  }
  return (struct slot){end, slot->end - end > PAGE ? end + PAGE : slot->end};
}

/* The first byte at which two memories differ, or n. */
static int64_t difference(const unsigned char *a, const unsigned char *b, int64_t n) {
  if (!memcmp(a, b, (size_t)n)) {
    return n;
  }
  int64_t i = 0;
  while (a[i] == b[i]) {
    i++;
  }
  return i;
}

/* Which span of the running call lies in a slot; the last slot is scratch. */
static int64_t span_in(int64_t slot) {
  const struct place *places = (const struct place *)((const char *)(running + 1) + running->args_bytes);
  int64_t i = 0;
  while (i < running->spans && places[i].region != slot) {
    i++;
  }
  return i;
}

static void report(const char *what, int64_t slot, int64_t offset) {
  char name[32] = "scratch";
  if (slot < SPAN_LIMIT) {
    snprintf(name, sizeof name, "span %d", (int)span_in(slot));
  }
  printf("%s %s, %s: %s, offset %lld: %s\n", running->operation, running->label, placement_names[running_placement],
         name, (long long)offset, what);
}

static void on_fault(int signal, siginfo_t *info, void *context) {
  (void)signal, (void)context;
  unsigned char *at = info->si_addr;
  for (int i = 0; i <= SPAN_LIMIT; i++) {
    if (slots[i].start && at >= slots[i].start - PAGE && at < slots[i].end + PAGE) {
      report("touched a guard page", i, at - region_start(&slots[i], running_bytes[i]));
    }
  }
  printf("replay: fault at %p\n", (void *)at);
  fflush(stdout);
  _exit(1);
}

/* 1 if a region is not what it was on the scalar ISA, or what surrounds it was written to. */
static int is_wrong(int64_t i, const struct region *region, const unsigned char *contents) {
  struct slot open = open_side(&slots[i], region->bytes);
  int64_t size = open.end - open.start;
  int64_t at = difference(region_start(&slots[i], region->bytes), contents + region->after, region->bytes);
  if (at < region->bytes) {
    report("differs", i, at);
    return 1;
  }
  at = difference(open.start, poison, size);
  if (at < size) {
    report("was written outside", i, open.start + at - region_start(&slots[i], region->bytes));
    return 1;
  }
  return 0;
}

/* Whole cache lines, so that it is aligned where its end is. */
static size_t scratch_for(int op, int64_t cols) { return (lanewise_scratch_bytes(op, cols) + 63) / 64 * 64; }

static size_t largest_scratch(int64_t cols) {
  size_t largest = 0;
  for (int op = 0; op < OP_COUNT; op++) {
    size_t bytes = scratch_for(op, cols);
    largest = bytes > largest ? bytes : largest;
  }
  return largest;
}

/* Lays out one call's memory, runs it, compares. 1 if anything was wrong. */
static int replay(const struct isa_table *table, const struct call *call, const unsigned char *contents) {
  const char *recorded = (const char *)(call + 1);
  const struct place *places = (const struct place *)(recorded + call->args_bytes);
  const struct region *regions = (const struct region *)(places + call->spans);
  int64_t args[ARGS_LIMIT / 8], cols;
  memcpy(args, recorded, (size_t)call->args_bytes);
  memcpy(&cols, recorded + (size_t)call->spans * sizeof(struct span) + 2 * sizeof(int64_t), sizeof cols);
  for (int64_t i = 0; i < call->regions; i++) {
    running_bytes[i] = regions[i].bytes;
    struct slot open = open_side(&slots[i], regions[i].bytes);
    memset(open.start, POISON, (size_t)(open.end - open.start));
    memcpy(region_start(&slots[i], regions[i].bytes), contents + regions[i].before, (size_t)regions[i].bytes);
  }
  for (int64_t i = 0; i < call->spans; i++) {
    struct span *span = (struct span *)args + i;
    int64_t r = places[i].region;
    span->ptr = r < 0 ? NULL : region_start(&slots[r], regions[r].bytes) + places[i].offset;
  }
  int op = operation_number(call->operation);
  size_t scratch_bytes = scratch_for(op, cols);
  running_bytes[SPAN_LIMIT] = (int64_t)scratch_bytes;
  unsigned char *scratch = region_start(&slots[SPAN_LIMIT], (int64_t)scratch_bytes);
  memset(scratch, POISON, scratch_bytes);
  lanewise_run(table->kernels[op], args, scratch);
  int wrong = 0;
  for (int64_t i = 0; i < call->regions; i++) {
    wrong |= is_wrong(i, &regions[i], contents);
  }
  return wrong;
}

static const struct call *next(const struct call *call) {
  const char *end = (const char *)(call + 1) + call->args_bytes + call->spans * (int64_t)sizeof(struct place) +
                    call->regions * (int64_t)sizeof(struct region);
  return (const struct call *)end;
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fail("usage: replay RECORDING ISA");
  }
  const char *data = read_file(argv[1]);
  const struct isa_table *table = find_table(argv[2]);
  if (!lanewise_machine_allows(table->name)) {
    fail("this machine cannot run that ISA");
  }
  const struct head *head = (const struct head *)data;
  for (int i = 0; i < SPAN_LIMIT; i++) {
    slots[i] = make_slot((size_t)head->largest + PAGE);
  }
  slots[SPAN_LIMIT] = make_slot(largest_scratch(head->largest));
  memset(poison, POISON, sizeof poison);
  sigaction(SIGSEGV, &(struct sigaction){.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO}, NULL);
  int64_t wrong = 0;
  for (running_placement = AT_END; running_placement < PLACEMENTS; running_placement++) {
    running = (const struct call *)(head + 1);
    for (int64_t i = 0; i < head->calls; i++, running = next(running)) {
      wrong += replay(table, running, (const unsigned char *)data + head->contents);
    }
  }
  printf("replay %s: %lld calls, %d placements each, %lld wrong\n", table->name, (long long)head->calls, PLACEMENTS,
         (long long)wrong);
  return wrong != 0;
}
