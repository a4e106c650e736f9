# The seed that counts its steps.
from cpython.pythread cimport PyThread_type_lock
from libc.stdint cimport uint64_t


cdef class Stream:
    cdef readonly uint64_t seed, step
    cdef PyThread_type_lock lock  # held by the call that uses the next step
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
