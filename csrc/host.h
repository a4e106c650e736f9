/* What the package needs of the machine: which tables may run, how to run a kernel, scratch, a clock. */
#ifndef LANEWISE_HOST_H
#define LANEWISE_HOST_H

#include "ops.h"

/* Tables of this build, best first, ended by NULL. */
extern const struct isa_table *const lanewise_tables[];

/* x86_64, aarch64 or other: what an ISA's record calls its machine. */
extern const char lanewise_machine[];

/* What CPUID and XGETBV say, as numbers, so that a test can say something else. xcr0 is 0 without OSXSAVE. */
struct x86_registers {
  uint32_t max_leaf, leaf1_eax, leaf1_ecx, leaf7_ebx;
  uint64_t xcr0;
};

/* This machine's; zeros where there is no CPUID. */
struct x86_registers lanewise_x86_registers(void);

/* 1 unless the CPU or the operating system cannot run the named ISA. Pure. */
int lanewise_x86_allows(const char *isa, const struct x86_registers *registers);

/* The same question for this machine. */
int lanewise_machine_allows(const char *isa);

/* Names this CPU as kernels see it: equal numbers, equal answers of lanewise_machine_allows. */
void lanewise_cpu_signature(uint64_t out[4]);

/* The floating-point environment: the default one from enter to leave, then the caller's, flags included. */
#if defined __x86_64__ || defined _M_X64
typedef struct {
  unsigned mxcsr;
} lanewise_fp;
#elif defined __aarch64__
typedef struct {
  uint64_t fpcr, fpsr;
} lanewise_fp;
#else
#include <fenv.h>
typedef struct {
  fenv_t environment;
} lanewise_fp;
#endif
lanewise_fp lanewise_enter_fp(void);
void lanewise_leave_fp(lanewise_fp saved);

/* Runs a kernel in the default floating-point environment and restores the caller's. */
void lanewise_run(lanewise_kernel kernel, const void *args, void *scratch);

/* A call that several threads share: each takes the next rows until none are left, so it does not matter who comes, or
   when. args must last until all rows are done; the rest, as long as any thread may still come. */
struct lanewise_shared {
  lanewise_kernel kernel;
  const void *args;
  size_t args_size, rows_at;      /* bytes of the struct, and to its `rows` */
  int64_t rows, first_row, grain; /* grain: rows taken at a time */
  _Atomic int64_t taken, done;
};

/* Does rows of the call on this thread. True for the one thread that ends the last of them. */
int lanewise_share(struct lanewise_shared *call, void *scratch);

/* Whether all rows are done, now or within a time that is shorter than to fall asleep and be woken. */
int lanewise_soon_done(struct lanewise_shared *call);

/* This thread's scratch, grown to `bytes`; NULL if there is no memory. Freed when the thread ends. */
void *lanewise_scratch(size_t bytes);

/* Runs a kernel `repeats` times, the nanoseconds of each into out. */
void lanewise_time(lanewise_kernel kernel, const void *args, void *scratch, int64_t repeats, int64_t *out);

#endif
