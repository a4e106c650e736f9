/* The machine: best-first list of tables, the veto, the floating-point environment, scratch. */
#if !defined _WIN32
#define _GNU_SOURCE
#endif
#include "host.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined __x86_64__ || defined _M_X64
#define X86 1
#include <cpuid.h>
#include <xmmintrin.h>
#elif defined __aarch64__
#define ARM 1
#if defined __linux__
#include <sys/auxv.h>
#endif
#endif

#if defined _WIN32
#include <malloc.h>
#include <windows.h>
#else
#include <pthread.h>
#include <time.h>
#endif

extern const struct isa_table lanewise_scalar;
#if X86
extern const struct isa_table lanewise_avx2, lanewise_avx512;
#elif ARM
extern const struct isa_table lanewise_neon;
#endif

const struct isa_table *const lanewise_tables[] = {
#if X86
    &lanewise_avx512,
    &lanewise_avx2,
#elif ARM
    &lanewise_neon,
#endif
    &lanewise_scalar,
    NULL,
};

#if X86
const char lanewise_machine[] = "x86_64";
#elif ARM
const char lanewise_machine[] = "aarch64";
#else
const char lanewise_machine[] = "other";
#endif

/* ---- the veto ---- */

/* bits of CPUID leaf 1 ECX, leaf 7 EBX and XCR0: Intel SDM volume 2A, CPUID; volume 1, 13.3 */
enum {
  ECX_FMA = 1 << 12,
  ECX_OSXSAVE = 1 << 27,
  ECX_AVX = 1 << 28,
  ECX_F16C = 1 << 29,
  EBX_AVX2 = 1 << 5,
  EBX_AVX512F = 1 << 16,
  EBX_AVX512DQ = 1 << 17,
  EBX_AVX512BW = 1 << 30,
  XCR0_YMM = 0x6,
  XCR0_ZMM = 0xe6
};
#define EBX_AVX512VL (1u << 31)

int lanewise_x86_allows(const char *isa, const struct x86_registers *r) {
  const uint32_t ecx = ECX_FMA | ECX_AVX | ECX_F16C;
  const uint32_t ebx = EBX_AVX512VL | EBX_AVX512F | EBX_AVX512DQ | EBX_AVX512BW;
  uint64_t xcr0 = r->leaf1_ecx & ECX_OSXSAVE ? r->xcr0 : 0;
  int avx2 =
      r->max_leaf >= 7 && (r->leaf1_ecx & ecx) == ecx && (r->leaf7_ebx & EBX_AVX2) && (xcr0 & XCR0_YMM) == XCR0_YMM;
  if (!strcmp(isa, "scalar")) {
    return 1;
  }
  if (!strcmp(isa, "avx2")) {
    return avx2;
  }
  return !strcmp(isa, "avx512") && avx2 && (r->leaf7_ebx & ebx) == ebx && (xcr0 & XCR0_ZMM) == XCR0_ZMM;
}

struct x86_registers lanewise_x86_registers(void) {
  struct x86_registers r = {0};
#if X86
  uint32_t eax, ebx, ecx, edx;
  r.max_leaf = __get_cpuid_max(0, NULL);
  __cpuid(1, r.leaf1_eax, ebx, r.leaf1_ecx, edx);
  if (r.max_leaf >= 7) {
    __cpuid_count(7, 0, eax, r.leaf7_ebx, ecx, edx);
  }
  if (r.leaf1_ecx & ECX_OSXSAVE) { /* without it XGETBV itself faults */
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    r.xcr0 = (uint64_t)edx << 32 | eax;
  }
#endif
  return r;
}

int lanewise_machine_allows(const char *isa) {
#if ARM && defined __linux__
  if (!strcmp(isa, "neon")) {
    return (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0;
  }
#elif ARM
  if (!strcmp(isa, "neon")) {
    return 1; /* the baseline of every system that runs on aarch64 */
  }
#endif
#ifdef LANEWISE_SIMDE /* tests build AVX-512 out of AVX2 */
  isa = strcmp(isa, "avx512") ? isa : "avx2";
#endif
  struct x86_registers r = lanewise_x86_registers();
  return lanewise_x86_allows(isa, &r);
}

void lanewise_cpu_signature(uint64_t out[4]) {
  struct x86_registers r = lanewise_x86_registers();
  out[0] = (uint64_t)r.max_leaf << 32 | r.leaf1_eax;
  out[1] = (uint64_t)r.leaf1_ecx << 32 | r.leaf7_ebx;
  out[2] = r.xcr0;
  out[3] = 0;
#if X86
  uint32_t eax, ebx, ecx, edx;
  __cpuid(0, eax, ebx, ecx, edx);
  out[3] = (uint64_t)ebx << 32 | ecx; /* enough of the vendor's name to tell vendors apart */
#elif ARM && defined __linux__
  out[0] = getauxval(AT_HWCAP);
  out[1] = getauxval(AT_HWCAP2);
#endif
}

/* ---- running a kernel ---- */

/* A host may have set flush-to-zero or another rounding; results must not depend on it, nor may it see our flags. */
#if X86
lanewise_fp lanewise_enter_fp(void) {
  lanewise_fp saved = {_mm_getcsr()};
  _mm_setcsr(0x1f80); /* round to nearest, all exceptions masked, subnormals kept */
  return saved;
}
void lanewise_leave_fp(lanewise_fp saved) { _mm_setcsr(saved.mxcsr); }
#elif ARM
lanewise_fp lanewise_enter_fp(void) {
  lanewise_fp saved;
  __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr\n\tmsr fpcr, xzr" : "=r"(saved.fpcr), "=r"(saved.fpsr));
  return saved;
}
void lanewise_leave_fp(lanewise_fp saved) {
  __asm__ volatile("msr fpsr, %1\n\tmsr fpcr, %0" : : "r"(saved.fpcr), "r"(saved.fpsr));
}
#else
lanewise_fp lanewise_enter_fp(void) {
  lanewise_fp saved;
  fegetenv(&saved.environment);
  fesetenv(FE_DFL_ENV);
  return saved;
}
void lanewise_leave_fp(lanewise_fp saved) { fesetenv(&saved.environment); }
#endif

void lanewise_run(lanewise_kernel kernel, const void *args, void *scratch) {
  lanewise_fp saved = lanewise_enter_fp();
  kernel(args, scratch);
  lanewise_leave_fp(saved);
}

static int64_t nanoseconds(void) {
#if defined _WIN32
  LARGE_INTEGER now, frequency;
  QueryPerformanceCounter(&now);
  QueryPerformanceFrequency(&frequency);
  return (int64_t)((double)now.QuadPart * 1e9 / (double)frequency.QuadPart);
#else
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
#endif
}

void lanewise_time(lanewise_kernel kernel, const void *args, void *scratch, int64_t repeats, int64_t *out) {
  for (int64_t i = 0; i < repeats; i++) {
    int64_t start = nanoseconds();
    lanewise_run(kernel, args, scratch);
    out[i] = nanoseconds() - start;
  }
}

/* ---- sharing a call ---- */

union any_args {
#define KERNEL(group, name, args, scratch_bytes) struct args name;
#include "kernels.def"
#undef KERNEL
};

int lanewise_share(struct lanewise_shared *call, void *scratch) {
  union any_args part;
  int64_t *rows = (int64_t *)((char *)&part + call->rows_at), first;
  int last = 0;
  while ((first = atomic_fetch_add(&call->taken, call->grain)) < call->rows) {
    int64_t left = call->rows - first, count = left < call->grain ? left : call->grain;
    memcpy(&part, call->args, call->args_size);
    rows[0] = count;
    rows[1] = call->first_row + first;
    lanewise_run(call->kernel, &part, scratch);
    last = atomic_fetch_add(&call->done, count) + count == call->rows;
  }
  return last;
}

static void relax(void) {
#if X86
  _mm_pause();
#elif ARM
  __asm__ volatile("yield");
#endif
}

int lanewise_soon_done(struct lanewise_shared *call) {
  const int64_t soon = 50000; /* ns: waking a thread takes 40,000 on a virtual Zen 3 (2026-11-29) */
  int64_t end = nanoseconds() + soon;
  while (atomic_load(&call->done) < call->rows) {
    if (nanoseconds() > end) {
      return 0;
    }
    relax();
  }
  return 1;
}

/* ---- scratch ---- */

struct arena {
  void *memory;
  size_t bytes;
};

static _Thread_local struct arena arena;

#if defined _WIN32
static void *allocate(size_t bytes) { return _aligned_malloc(bytes, 64); }
static void release(void *memory) { _aligned_free(memory); }
static DWORD fls_key = FLS_OUT_OF_INDEXES;
static void __stdcall release_at_exit(void *memory) { release(memory); }
static void free_at_thread_exit(void *memory) {
  if (fls_key == FLS_OUT_OF_INDEXES) {
    fls_key = FlsAlloc(release_at_exit);
  }
  FlsSetValue(fls_key, memory);
}
#else
static void *allocate(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }
static void release(void *memory) { free(memory); }
static pthread_key_t exit_key;
static pthread_once_t exit_once = PTHREAD_ONCE_INIT;
static void make_key(void) { pthread_key_create(&exit_key, release); }
static void free_at_thread_exit(void *memory) {
  pthread_once(&exit_once, make_key);
  pthread_setspecific(exit_key, memory);
}
#endif

void *lanewise_scratch(size_t bytes) {
  if (arena.bytes < bytes) {
    void *memory = allocate(bytes);
    if (!memory) {
      return NULL;
    }
    release(arena.memory);
    arena = (struct arena){memory, bytes};
    free_at_thread_exit(memory);
  }
  return arena.memory;
}
