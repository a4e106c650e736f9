"""How many threads a call may use, and the workers that help the thread that calls (docs/threads.md).

A worker is asked for help, never waited for: a job is done by whoever takes rows of it, the caller in any case, and a
worker that comes late finds nothing left (csrc/host.h, lanewise_shared). So nothing that befalls a worker, or keeps
one from being started, can hold up a call.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from . import _quota

Job = Callable[[], object]

_lock = threading.RLock()  # a signal's handler or a finaliser may call while its thread is in here
_chosen: int | None = None  # by set_num_threads()
_default: int | None = None  # once it was looked up
_pool: Pool | None = None


class Pool:
    """Daemon threads that wait at one queue, started when they are first wanted.

    Not a ThreadPoolExecutor: its submit() takes four times as long as put(), for futures that nobody looks at.
    """

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.workers: list[threading.Thread] = []

    def ask(self, job: Job, helpers: int) -> None:
        while len(self.workers) < helpers and self.start():
            pass
        for _ in self.workers[:helpers]:
            self.jobs.put(job)

    def start(self) -> bool:
        worker = threading.Thread(target=work, args=(self.jobs,), daemon=True, name="lanewise")
        try:
            worker.start()
        except RuntimeError:  # the system has no more threads, or Python is ending
            return False
        self.workers.append(worker)
        return True

    def end(self) -> None:
        for _ in self.workers:
            self.jobs.put(None)
        for worker in self.workers:
            worker.join()


def work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # not kept until the next one comes


def recruit(job: Job, most: int, others: int) -> None:
    """Asks up to `most` workers to call `job`: those that are left beside `others`, calls that are shared already."""
    global _pool
    with _lock:
        helpers = min(get_num_threads() - 1 - others, most)
        if helpers > 0:
            _pool = _pool or Pool()
            _pool.ask(job, helpers)


def get_num_threads() -> int:
    """How many threads a call may use, the calling one included.

    >>> import lanewise
    >>> lanewise.get_num_threads() >= 1
    True
    """
    global _default
    if _chosen is not None:
        return _chosen
    if _default is None:
        _default = from_environment() or _quota.usable_cpus()
    return _default


def from_environment() -> int | None:
    text = os.environ.get("LANEWISE_NUM_THREADS", "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"LANEWISE_NUM_THREADS must be a whole number from 1 on, got {text!r}")
    return int(text) if text else None


def set_num_threads(n: int | None) -> None:
    """Lets a call use up to n threads, the calling one included; None: as many as this process has CPUs.

    1 ends the package's workers. Results do not change, only the time they take. Raises ValueError, TypeError.

    >>> import lanewise
    >>> lanewise.set_num_threads(1)
    >>> lanewise.get_num_threads()
    1
    >>> lanewise.set_num_threads(None)
    """
    global _chosen, _default, _pool
    if n is not None:
        try:
            n = operator.index(n)
        except TypeError:
            raise TypeError(f"n must be an integer or None, got {type(n).__name__}") from None
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
    with _lock:
        _chosen, _default = n, None
        old, _pool = _pool, None
    if old is not None:  # not under the lock: a worker may have a finaliser to run that calls
        old.end()


def after_fork() -> None:
    """No worker has come along into the child, and its CPUs may be others."""
    global _lock, _default, _pool
    _lock, _default, _pool = threading.RLock(), None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)
