# Who is at it: one thread at a time, and no call within a call.
from cpython.pythread cimport *


cdef struct turn:
    PyThread_type_lock lock
    unsigned long thread  # which has it; 0: none


cdef inline int open_turns(turn *t) except -1:
    t.lock, t.thread = PyThread_allocate_lock(), 0
    if t.lock == NULL:
        raise MemoryError("no memory for a lock")
    return 0


cdef inline void close_turns(turn *t) noexcept:
    if t.lock != NULL:
        PyThread_free_lock(t.lock)


cdef inline bint is_mine(const turn *t) noexcept:
    return t.thread == <unsigned long>PyThread_get_thread_ident()


cdef inline int take_turn(turn *t, str what) except -1:
    if not PyThread_acquire_lock(t.lock, NOWAIT_LOCK):
        if is_mine(t):
            raise RuntimeError(f"this {what} is in use already: what one of its calls runs, such as a step, must not use it")
        raise RuntimeError(f"this {what} is in use by another thread; give each thread its own")
    t.thread = <unsigned long>PyThread_get_thread_ident()
    return 0


cdef inline void end_turn(turn *t) noexcept:
    t.thread = 0
    PyThread_release_lock(t.lock)
