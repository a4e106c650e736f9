# Programs, for whoever runs them.
cimport cython
from libc.stdint cimport int64_t

from lanewise._ops cimport chain_step


@cython.final
cdef class Program:
    cdef readonly tuple steps
    cdef bytes lines  # chain_step[count]
    cdef double first[2]  # the state that a sequence begins with
    cdef int64_t count(self) noexcept
    cdef const chain_step *line(self) noexcept
