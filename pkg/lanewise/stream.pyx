# cython: language_level=3, freethreading_compatible=True, auto_pickle=False
"""Stream, the seed that counts its steps."""
import operator

from lanewise._turns cimport close_turns, end_turn, is_mine, open_turns, take_turn


cdef class Stream:
    """A seed that counts: each call of sample that is given it uses the next step.

    One thread at a time: a second one that uses it during a call gets a RuntimeError.

    >>> rng, logits = lanewise.Stream(42), np.zeros(1000, np.float32)
    >>> first = lanewise.sample(logits, rng=rng)
    >>> first == lanewise.sample(logits, seed=42, step=0), rng.step
    (True, 1)
    """

    def __cinit__(self):
        open_turns(&self.turn)

    def __init__(self, seed, step=0):
        try:
            seed, step = operator.index(seed), operator.index(step)
        except TypeError:
            raise TypeError(f"seed and step must be integers, got {seed!r} and {step!r}") from None
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        if not 0 <= step <= 2**32:  # the last is a stream that has used up its steps
            raise ValueError(f"step must be in [0, 2**32), got {step}")
        self.seed, self.step = seed, step

    def __dealloc__(self):
        close_turns(&self.turn)

    cdef int enter(self) except -1:
        return take_turn(&self.turn, "Stream")

    cdef void leave(self) noexcept:
        end_turn(&self.turn)

    def __enter__(self):
        self.enter()
        return self

    def __exit__(self, *exc):
        if not is_mine(&self.turn):
            raise RuntimeError("this Stream was not entered by this thread")
        self.leave()

    def __repr__(self):
        return f"Stream(seed={self.seed}, step={self.step})"

    def __reduce__(self):
        return type(self), (self.seed, self.step)
