# The seed that counts its steps.
from libc.stdint cimport uint64_t

from lanewise._turns cimport turn


cdef class Stream:
    cdef readonly uint64_t seed, step
    cdef turn turn  # of the call that uses the next step
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
