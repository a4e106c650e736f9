# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""The table of operations: which are compiled, which may run here, which is bound, and how one is run."""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pythread cimport *

import os

import numpy

from lanewise import _threads


cdef extern from "ops.h":
    ctypedef void (*lanewise_kernel)(const void *, void *) noexcept nogil
    size_t lanewise_scratch_bytes(int op, int64_t cols) nogil
    struct isa_table:
        const char *name
        lanewise_kernel kernels[1]  # OP_COUNT


cdef extern from "host.h":
    const isa_table *const lanewise_tables[1]  # ended by NULL
    const char lanewise_machine[1]
    struct x86_registers:
        unsigned int max_leaf, leaf1_eax, leaf1_ecx, leaf7_ebx
        uint64_t xcr0
    x86_registers lanewise_x86_registers() nogil
    int lanewise_x86_allows(const char *isa, const x86_registers *registers) nogil
    int lanewise_machine_allows(const char *isa) nogil
    void lanewise_cpu_signature(uint64_t *out) nogil
    ctypedef struct lanewise_fp:
        pass
    lanewise_fp lanewise_enter_fp() nogil
    void lanewise_leave_fp(lanewise_fp saved) nogil
    void lanewise_run(lanewise_kernel kernel, const void *args, void *scratch) noexcept nogil
    struct lanewise_shared:
        lanewise_kernel kernel
        const void *args
        size_t args_size, rows_at
        int64_t rows, first_row, grain
    int lanewise_share(lanewise_shared *call, void *scratch) noexcept nogil
    int lanewise_soon_done(lanewise_shared *call) noexcept nogil
    void *lanewise_scratch(size_t bytes) nogil
    void lanewise_time(lanewise_kernel kernel, const void *args, void *scratch, int64_t repeats, int64_t *out) noexcept nogil


cdef extern from *:
    """
    static const char *const operation_names[] = {
    #define KERNEL(group, name, args, scratch_bytes) #group, #name,
    #include "kernels.def"
    #undef KERNEL
    };
    static const size_t span_counts[] = { /* spans come first in every args struct, `rows` right after them */
    #define KERNEL(group, name, args, scratch_bytes) offsetof(struct args, rows) / sizeof(struct span),
    #include "kernels.def"
    #undef KERNEL
    };
    static const size_t args_sizes[] = {
    #define KERNEL(group, name, args, scratch_bytes) sizeof(struct args),
    #include "kernels.def"
    #undef KERNEL
    };
    """
    const char *const operation_names[1]
    const size_t span_counts[1]
    const size_t args_sizes[1]


# Any thread may bind while any other runs: a kernel pointer is read and written whole, and is NULL until the first bind.
cdef extern from *:
    """
    #include <stdatomic.h>
    static _Atomic(lanewise_kernel) bound[OP_COUNT];
    static inline lanewise_kernel load_bound(int op) { return atomic_load_explicit(&bound[op], memory_order_relaxed); }
    static inline void store_bound(int op, lanewise_kernel kernel) {
      atomic_store_explicit(&bound[op], kernel, memory_order_relaxed);
    }
    """
    lanewise_kernel load_bound(int op) nogil
    void store_bound(int op, lanewise_kernel kernel) nogil


cdef object resolve = None   # _dispatch.resolve, called before the first operation runs
cdef object recorder = None  # a test's hook: called with every call's memory, before and after

NAMES = tuple(operation_names[2 * i + 1].decode() for i in range(OP_COUNT))
MACHINE = lanewise_machine.decode()
GROUPS = {operation_names[2 * i + 1].decode(): operation_names[2 * i].decode() for i in range(OP_COUNT)}
_isa_of = [""] * OP_COUNT


cdef const isa_table *table(str isa) except NULL:
    cdef int i = 0
    while lanewise_tables[i] != NULL:
        if lanewise_tables[i].name.decode() == isa:
            return lanewise_tables[i]
        i += 1
    raise KeyError(isa)


def compiled():
    """Names of the ISAs in this build, best first."""
    cdef int i = 0
    names = []
    while lanewise_tables[i] != NULL:
        names.append(lanewise_tables[i].name.decode())
        i += 1
    return tuple(names)


def allowed(str isa):
    """Whether CPU and operating system can run `isa`, by C's own look at the registers."""
    return bool(lanewise_machine_allows(isa.encode()))


def registers():
    """What CPUID and XGETBV say here, as x86_allows() takes it; zeros where there is no CPUID."""
    cdef x86_registers r = lanewise_x86_registers()
    return {"max_leaf": r.max_leaf, "leaf1_ecx": r.leaf1_ecx, "leaf7_ebx": r.leaf7_ebx, "xcr0": r.xcr0}


def x86_allows(str isa, *, unsigned int max_leaf, unsigned int leaf1_ecx, unsigned int leaf7_ebx, uint64_t xcr0):
    """The same question for register values a test makes up."""
    cdef x86_registers r
    r.max_leaf, r.leaf1_eax, r.leaf1_ecx, r.leaf7_ebx, r.xcr0 = max_leaf, 0, leaf1_ecx, leaf7_ebx, xcr0
    return bool(lanewise_x86_allows(isa.encode(), &r))


def cpu_signature():
    """Equal strings, equal answers of allowed()."""
    cdef uint64_t s[4]
    lanewise_cpu_signature(s)
    return "-".join(f"{s[i]:x}" for i in range(4))


def bind(str op, str isa):
    """Binds one operation to one ISA's kernel. The caller has made sure that the ISA may run."""
    cdef int i = NAMES.index(op)
    store_bound(i, table(isa).kernels[i])
    _isa_of[i] = isa


def bindings():
    """{operation: isa} as bound now; "" where nothing is."""
    return dict(zip(NAMES, _isa_of))


def set_resolver(callable_):
    """What binds every operation, called when one is run that is not bound yet."""
    global resolve
    resolve = callable_


def set_recorder(callable_):
    """Test hook: callable_(operation, args, [memory before], [memory after]) for every run; None ends it."""
    global recorder
    recorder = callable_


cdef int64_t exact_only = 0


def set_force_exact(bint on):
    """Test hook: operations that have a fast path take the exact one."""
    global exact_only
    exact_only = on


cdef int64_t force_exact():
    return exact_only


cdef list memory(int op, const void *args):
    cdef const span *spans = <const span *>args
    return [PyBytes_FromStringAndSize(<char *>spans[i].ptr, spans[i].bytes) if spans[i].ptr else None
            for i in range(<int>span_counts[op])]


cdef lanewise_kernel kernel_of(int op) except NULL:
    if load_bound(op) == NULL:
        resolve()
    return load_bound(op)


cdef void *scratch_for(int op, int64_t cols) except NULL:
    cdef void *scratch = lanewise_scratch(lanewise_scratch_bytes(op, cols))
    if scratch == NULL:
        raise MemoryError(f"no memory for the scratch of {cols} columns")
    return scratch


# ---- threads ----

# Work is counted in elements read. A call is shared from `crossover` on, in parts that are worth taking. Measured:
# docs/threads.md.
cdef enum:
    CROSSOVER = 1_300_000
    PARTS = 16  # of a call that is just worth it
cdef double crossover = CROSSOVER


def set_crossover(work=None):
    """Test hook: the work from which calls are shared; None for what is measured."""
    global crossover
    crossover = CROSSOVER if work is None else work


# Calls that are shared now.
cdef extern from *:
    """
    static _Atomic int64_t calls;
    static inline int64_t begin_call(void) { return atomic_fetch_add(&calls, 1); }
    static inline void end_call(void) { atomic_fetch_sub(&calls, 1); }
    static inline void forget_calls(void) { atomic_store(&calls, 0); }
    """
    int64_t begin_call() nogil
    void end_call() nogil
    void forget_calls() nogil


def after_fork():
    """No other thread, so no call either, has come along into the child."""
    forget_calls()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)


@cython.internal
cdef class Job:
    """A shared call, as workers see it: calling it does rows until none are left."""
    cdef lanewise_shared call
    cdef size_t scratch_bytes
    cdef PyThread_type_lock finished  # held until all rows are done

    def __cinit__(self):
        self.finished = PyThread_allocate_lock()
        if self.finished == NULL:
            raise MemoryError("no memory for a lock")
        PyThread_acquire_lock(self.finished, NOWAIT_LOCK)

    def __dealloc__(self):
        if self.finished != NULL:
            PyThread_free_lock(self.finished)

    def __call__(self):
        cdef void *scratch = lanewise_scratch(self.scratch_bytes)
        if scratch != NULL:  # else the rows are left to the others
            with nogil:
                self.work(scratch)

    cdef void work(self, void *scratch) noexcept nogil:
        if lanewise_share(&self.call, scratch):
            PyThread_release_lock(self.finished)


cdef const int64_t *rows_of(int op, const void *args) noexcept:
    """Where the struct has its `rows` and `first_row`."""
    return <const int64_t *>(<const span *>args + span_counts[op])


cdef int run_shared(int op, lanewise_kernel kernel, const void *args, int64_t cols, int64_t row_work) except -1:
    cdef Job job = Job()
    cdef void *scratch = scratch_for(op, cols)  # or no worker is asked
    cdef lanewise_shared *call = &job.call
    cdef int64_t others, parts
    call.kernel, call.args, call.args_size = kernel, args, args_sizes[op]
    call.rows_at = span_counts[op] * sizeof(span)
    call.rows, call.first_row = rows_of(op, args)[0], rows_of(op, args)[1]
    call.grain = max(1, <int64_t>(crossover / PARTS / row_work))
    job.scratch_bytes = lanewise_scratch_bytes(op, cols)
    parts = (call.rows + call.grain - 1) // call.grain
    others = begin_call()
    try:
        _threads.recruit(job, parts - 1, others)
    finally:  # whatever came between, a signal for instance: workers may be at it already
        scratch = lanewise_scratch(job.scratch_bytes)  # a signal's handler that calls may have moved it
        with nogil:
            job.work(scratch)
            if not lanewise_soon_done(call):
                PyThread_acquire_lock(job.finished, WAIT_LOCK)
        end_call()
    return 0


cdef object to_float32(object array):
    cdef lanewise_fp saved = lanewise_enter_fp()  # NumPy would round as the caller's mode says
    try:
        with numpy.errstate(over="ignore"):  # beyond float32 is an infinity, and judged as such
            return numpy.asarray(array, numpy.float32)
    finally:
        lanewise_leave_fp(saved)


cdef int run(int op, const void *args, int64_t cols, int64_t row_work=0) except -1:
    cdef lanewise_kernel kernel = kernel_of(op)
    cdef int64_t rows = rows_of(op, args)[0]
    cdef void *scratch
    row_work = row_work or cols + 200
    if recorder is not None:
        return run_recorded(op, kernel, args, cols)
    if rows > 1 and rows * <double>row_work >= crossover and _threads.get_num_threads() > 1:
        return run_shared(op, kernel, args, cols, row_work)
    scratch = scratch_for(op, cols)  # last: where Python runs, a signal's handler that calls may move it
    with nogil:
        lanewise_run(kernel, args, scratch)
    return 0


cdef int run_recorded(int op, lanewise_kernel kernel, const void *args, int64_t cols) except -1:
    before = memory(op, args)
    cdef void *scratch = scratch_for(op, cols)
    with nogil:
        lanewise_run(kernel, args, scratch)
    recorder(NAMES[op], PyBytes_FromStringAndSize(<char *>args, args_sizes[op]), before, memory(op, args))
    return 0


cdef span span_of(object array) except *:
    cdef span s
    if not array.flags.c_contiguous:
        raise ValueError(f"arrays must be C-contiguous, got strides {array.strides}")
    s.ptr = <void *><size_t>array.ctypes.data
    s.bytes = array.nbytes
    return s


def run_rows(str op, x, out, int64_t dtype=DTYPE_F32, double temperature=1.0, int64_t repeats=0):
    """Tests and benches: an operation of `row_args` on C-contiguous arrays, rows in the first axis.

    With repeats, runs it that often and returns the nanoseconds of each run, timed in C.
    """
    cdef row_args a
    cdef int i = NAMES.index(op)
    rows = x.shape[0] if x.ndim == 2 else 1
    cols = x.shape[x.ndim - 1]
    t = numpy.array([temperature])
    a.x, a.out, a.temperature = span_of(x), span_of(out), span_of(t)
    a.rows, a.first_row, a.cols, a.dtype = rows, 0, cols, dtype
    a.x_stride, a.out_stride, a.temperature_step = x.nbytes // max(rows, 1), out.nbytes // max(rows, 1), 0
    return timed(i, &a, cols, repeats)


def run_moves(str op, src, dst, sources, targets, int64_t repeats):
    """Benches: the nanoseconds of each run of a floor of the moves, blocks in the first axis of C-contiguous arrays."""
    cdef move_args a
    cdef int i = NAMES.index(op)
    a.src, a.dst, a.sources, a.targets = span_of(src), span_of(dst), span_of(sources), span_of(targets)
    a.rows, a.first_row, a.cols = len(sources), 0, 0
    a.bytes = a.src_block = a.dst_block = src[0].nbytes
    return timed(i, &a, 0, repeats)


def run_noise(str op, out, int64_t first, int64_t domain, uint64_t seed, uint64_t key, uint64_t step):
    """Tests: `philox` into uint64, `gumbel` into float64."""
    cdef noise_args a
    cdef int i = NAMES.index(op)
    a.out = span_of(out)
    a.rows, a.first_row, a.cols, a.first, a.domain = 1, 0, out.size, first, domain
    a.seed, a.key, a.step = seed, key, step
    run(i, &a, out.size)


cdef object timed(int op, const void *args, int64_t cols, int64_t repeats):
    if not repeats:
        run(op, args, cols)
        return None
    cdef lanewise_kernel kernel = kernel_of(op)
    ns = numpy.empty(repeats, numpy.int64)
    cdef int64_t *out = <int64_t *><size_t>ns.ctypes.data
    cdef void *scratch = scratch_for(op, cols)
    with nogil:
        lanewise_time(kernel, args, scratch, repeats, out)
    return ns
