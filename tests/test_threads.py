"""Threads: the answer does not depend on them, and nothing that befalls one holds up a call."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lanewise
from lanewise import InvalidLogitsError, _ops, _quota, _threads

from cases import CASES, DTYPES, KV, Case
from test_cases import assert_same, run_guarded

BY_ROW = [case for case in CASES if case.inputs.__name__ == "make"]  # the others have one row a call
SHARED = BY_ROW + KV
COUNTS = (2, 3, 8)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    _ops.set_crossover()
    lanewise.set_num_threads(None)


@pytest.fixture
def shared() -> None:
    """Every call of more than one row is shared, a row at a time."""
    _ops.set_crossover(0)
    lanewise.set_num_threads(4)


def logits(rows: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, vocab)).astype(np.float32)


def draw(x: np.ndarray, **kw: Any) -> np.ndarray:
    tokens: np.ndarray = lanewise.sample(x, **({"top_k": 20, "top_p": 0.9, "seed": 1, "step": 0} | kw))
    return tokens


def at_once(work: Callable[[int], None], count: int = 8) -> None:
    """work(0), work(1), ... in as many threads; the first exception of any."""
    start, errors = threading.Barrier(count), []

    def run(i: int) -> None:
        start.wait()
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def workers() -> int:
    return sum(thread.name == "lanewise" for thread in threading.enumerate())


def elsewhere(job: Callable[[], object], most: int, others: int) -> None:
    """Stands in for recruit(): another thread does all rows before the caller comes to them."""
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


# ---- the answer ----


@pytest.mark.parametrize(
    ("case", "n", "dtype"),
    [
        pytest.param(case, n, dtype, id=f"{case.name}-{n}-{dtype}")
        for case in CASES
        for n, dtype in ((1, "f32"), (17, "f16"), (1000, "f16"), (4099, "f32"))
        if dtype in case.dtypes
    ],
)
def test_the_number_of_threads_does_not_show(
    case: Case, n: int, dtype: str, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, asked, recruit = case.inputs(np.random.default_rng(n), n, DTYPES[dtype]), [], _threads.recruit
    monkeypatch.setattr(_threads, "recruit", lambda *args: asked.append(args) or recruit(*args))
    lanewise.set_num_threads(1)
    wanted = [run_guarded(case, x, settings, at_end=True) for settings in case.settings(n)]
    assert not asked or case not in SHARED  # some set the number of threads themselves
    asked.clear()
    for count in COUNTS:
        lanewise.set_num_threads(count)
        for settings, want in zip(case.settings(n), wanted, strict=True):
            assert_same(run_guarded(case, x, settings, at_end=True), want, (n, settings, count))
            assert asked or case not in SHARED  # of the others, some have one row a call
            asked.clear()


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_rows_that_a_worker_did_are_the_callers(case: Case, shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = case.inputs(np.random.default_rng(1), 1000, DTYPES["f32"])
    for settings in case.settings(1000):
        with monkeypatch.context() as patch:
            patch.setattr(_threads, "recruit", elsewhere)
            got = run_guarded(case, x, settings, at_end=False)
        lanewise.set_num_threads(1)
        assert_same(got, run_guarded(case, x, settings, at_end=False), settings)
        lanewise.set_num_threads(4)


@pytest.mark.parametrize("work", [1, 5e4, 3e5, 2e6])
def test_the_size_of_parts_does_not_show(work: float) -> None:
    x = logits(67, 3000)
    lanewise.set_num_threads(1)
    want = draw(x)
    lanewise.set_num_threads(4)
    _ops.set_crossover(work)
    assert draw(x).tolist() == want.tolist()


def test_invalid_rows_are_named_as_without_threads(shared: None) -> None:
    x = logits(90, 300)
    bad = [0, 31, 88, 89]
    x[bad, 7] = np.nan
    with pytest.raises(InvalidLogitsError) as caught:
        draw(x)
    assert caught.value.rows == bad
    good = np.setdiff1d(np.arange(90), bad)
    assert caught.value.tokens[bad].tolist() == [-1] * 4
    assert caught.value.tokens[good].tolist() == draw(x[good], keys=good).tolist()


def test_a_bad_argument_is_an_error_before_anything_is_written(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lanewise.set_num_threads(None)
    monkeypatch.setenv("LANEWISE_NUM_THREADS", "many")
    out = np.full((9, 50), 7, np.float32)
    with pytest.raises(ValueError, match="LANEWISE_NUM_THREADS must be a whole number from 1 on, got 'many'"):
        lanewise.softmax(logits(9, 50), out=out)
    assert (out == 7).all()
    monkeypatch.undo()


# ---- faults that others had (test_faults.py has them without threads) ----


def test_sa23_ids_stay_in_range_with_threads(shared: None) -> None:
    for vocab in (1000, 10, 8):
        x = logits(989, vocab)
        first = draw(x)
        assert first.min() >= 0 and first.max() < vocab
        for _ in range(100):
            assert (draw(x) == first).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_pa06_a_child_of_a_parent_with_workers_can_work(shared: None) -> None:
    x = logits(64, 500)
    want = draw(x).tolist()
    assert workers() == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any thread
        child = os.fork()
    if child == 0:
        threading.Timer(20, os._exit, [2]).start()  # a child that waits for ever
        none = workers() == 0
        os._exit(0 if none and draw(x).tolist() == want and workers() == 3 else 1)
    assert draw(x).tolist() == want
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- who comes to help ----


def test_workers_come_when_they_are_wanted_and_go() -> None:
    lanewise.set_num_threads(5)
    draw(logits(4, 100))  # too little work
    lanewise.softmax(np.zeros(10**6, np.float32))  # one row
    assert workers() == 0
    _ops.set_crossover(0)
    draw(logits(3, 100))
    assert workers() == 2  # a part for each
    draw(logits(100, 100))
    assert workers() == 4
    lanewise.set_num_threads(2)
    assert workers() == 0
    draw(logits(100, 100))
    assert workers() == 1
    lanewise.set_num_threads(1)
    draw(logits(100, 100))
    assert workers() == 0


def test_callers_at_once_share_the_workers(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, asked, recruit = logits(40, 2000), [], _threads.recruit
    want = draw(x).tolist()
    monkeypatch.setattr(_threads, "recruit", lambda *args: asked.append(args[1:]) or recruit(*args))

    def work(_: int) -> None:
        for _ in range(50):
            assert draw(x).tolist() == want
            assert workers() <= 3

    at_once(work)
    assert {most for most, _ in asked} == {39}
    assert all(0 <= others < 8 for _, others in asked)


def test_a_call_beside_others_asks_for_fewer(shared: None) -> None:
    class Counting(_threads.Pool):
        asked: list[int]

        def ask(self, job: Callable[[], object], helpers: int) -> None:
            self.asked.append(helpers)

    Counting.asked = []
    _threads._pool = Counting()
    for others in range(5):
        _threads.recruit(int, 100, others)
    assert Counting.asked == [3, 2, 1]


def test_calls_inside_calls_count_as_others(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def recruit(job: Callable[[], object], most: int, others: int) -> None:
        seen.append(others)
        if len(seen) < 3:
            draw(logits(5, 50))

    monkeypatch.setattr(_threads, "recruit", recruit)
    draw(logits(5, 50))
    draw(logits(5, 50))
    assert seen == [0, 1, 2, 0]


def test_the_number_may_change_while_calls_run(shared: None) -> None:
    x = logits(40, 2000)
    want = draw(x).tolist()

    def work(i: int) -> None:
        for j in range(60):
            if i < 2:
                lanewise.set_num_threads(1 + (i + j) % 5)
            else:
                assert draw(x).tolist() == want

    at_once(work)
    lanewise.set_num_threads(1)
    assert workers() == 0


def test_a_recorded_call_is_whole(shared: None) -> None:
    calls: list[Any] = []
    _ops.set_recorder(lambda *call: calls.append(call))
    try:
        draw(logits(9, 50))
    finally:
        _ops.set_recorder(None)
    assert len(calls) == 1 and workers() == 0


# ---- what may befall a worker ----


def test_a_worker_that_comes_late_touches_nothing(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], object]] = []
    monkeypatch.setattr(_threads, "recruit", lambda job, most, others: late.extend([job] * most))
    x = logits(9, 50)
    out = np.empty_like(x)
    lanewise.softmax(x, out=out)
    assert len(late) == 8
    out[:] = 7
    for job in late:
        job()
    assert (out == 7).all()


def test_an_interrupted_call_ends_its_rows_first(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = logits(200, 3000)
    want, out, recruit = lanewise.softmax(x), np.zeros_like(x), _threads.recruit

    def interrupted(*args: Any) -> None:
        recruit(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(_threads, "recruit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lanewise.softmax(x, out=out)
    assert out.tobytes() == want.tobytes()
    monkeypatch.undo()
    assert lanewise.softmax(x).tobytes() == want.tobytes()


def test_without_more_threads_the_caller_works_alone(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    x = logits(20, 500)
    want = draw(x).tolist()
    lanewise.set_num_threads(4)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert draw(x).tolist() == want
    assert workers() == 0


def python(code: str, **environment: str) -> str:
    """What a new Python prints that runs `code` with x, a batch, and want, its tokens without threads."""
    ready = """
        import os, sys, threading, numpy as np, lanewise
        from lanewise import _ops, _threads
        x = np.random.default_rng(0).standard_normal((40, 3000)).astype(np.float32)
        def draw():
            return lanewise.sample(x, top_k=20, top_p=0.9, seed=1, step=0).tolist()
        lanewise.set_num_threads(1)
        want = draw()
        lanewise.set_num_threads(4)
        _ops.set_crossover(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(ready) + textwrap.dedent(code)]
    try:
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        pytest.skip("this Python runs under an emulator that cannot start it again")
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs memory")
def test_a_worker_without_scratch_leaves_its_rows_to_the_caller() -> None:
    code = """
        import resource
        x = np.zeros((2, 10**6), np.float32)
        lanewise.set_num_threads(1)
        want = draw()  # the caller has its scratch
        lanewise.set_num_threads(3)
        lanewise.argmax(x)  # and there are workers, whose scratch is small
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, used + 2**24))
        results = []
        recruit = _threads.recruit
        def wait(job, most, others):
            recruit(lambda: results.append(job()), most, others)
            while len(results) < most:
                pass
        _threads.recruit = wait
        print(draw() == want, len(results), sum(t.name == "lanewise" for t in threading.enumerate()))
    """
    assert python(code) == "True 1 1"


@pytest.mark.parametrize("between", ["get_num_threads", "recruit"])
def test_a_call_in_the_middle_of_a_call_may_move_its_scratch(between: str) -> None:
    """A signal's handler that calls with a wider row gets more scratch; what the outer call had is freed."""
    code = f"""
        x = np.random.default_rng(0).standard_normal((3, 200_000), np.float32)
        lanewise.set_num_threads(1)
        want = draw()
        lanewise.set_num_threads(2)
        wide, inner, called = np.zeros(2**20, np.float32), _threads.{between}, []
        def outer(*args):
            if not called:
                called.append(lanewise.sample(wide, temperature=0.0))
            return inner(*args)
        _threads.{between} = outer
        print(draw() == want, called)
    """
    assert python(code) == "True [0]"


def test_the_end_of_the_process() -> None:
    """Calls from atexit, from threads that outlive the main one, and from one that is cut off, end or are cut off."""
    code = """
        import atexit, time
        def report(who):
            print(who, draw() == want, flush=True)
        def late():
            threading.main_thread().join()
            lanewise.set_num_threads(5)
            report("late")
        def endless():
            while True:
                draw()
        draw()
        atexit.register(report, "atexit")
        threading.Thread(target=late).start()
        for _ in range(3):
            threading.Thread(target=endless, daemon=True).start()
        time.sleep(0.2)
        report("main")
    """
    assert python(code).splitlines() == ["main True", "late True", "atexit True"]


def test_import_starts_nothing_and_asks_nothing() -> None:
    code = """
        import builtins, threading, numpy as np
        opened, plain = [], builtins.open
        import sys
        sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
        import lanewise
        lanewise.softmax(np.zeros((3, 50), np.float32))
        print([name for name in opened if "cgroup" in name or "mountinfo" in name], threading.active_count())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] 1", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_in_the_middle_of_everything() -> None:
    """Children that are made while other threads hold the lock and share calls."""
    code = """
        import warnings
        warnings.simplefilter("ignore")
        end = threading.Event()
        def work(lock):
            while not end.is_set():
                if lock:
                    with _threads._lock:
                        pass
                else:
                    draw()
        threads = [threading.Thread(target=work, args=(i < 2,)) for i in range(4)]
        [t.start() for t in threads]
        codes = set()
        for _ in range(20):
            child = os.fork()
            if not child:
                threading.Timer(60, os._exit, [2]).start()
                others = []
                recruit = _threads.recruit
                _threads.recruit = lambda *args: others.append(args[2]) or recruit(*args)
                os._exit(0 if draw() == want and others == [0] else 1)
            codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        end.set()
        [t.join() for t in threads]
        print(codes, draw() == want)
    """
    assert python(code) == "{0} True"


def test_a_subinterpreter_leaves_the_workers_alone() -> None:
    interpreters = pytest.importorskip("_xxsubinterpreters", reason="this Python has other subinterpreters")
    assert draw(logits(5, 50)).size == 5
    other = interpreters.create()
    try:
        interpreters.run_string(other, "import threading; assert threading.active_count() == 1")
    finally:
        interpreters.destroy(other)


# ---- how many ----


def test_the_number_is_checked() -> None:
    for wrong, error, message in (
        (0, ValueError, "n must be at least 1, got 0"),
        (-3, ValueError, "n must be at least 1, got -3"),
        (2.0, TypeError, "n must be an integer or None, got float"),
        ("2", TypeError, "n must be an integer or None, got str"),
    ):
        lanewise.set_num_threads(6)
        with pytest.raises(error, match=message):
            lanewise.set_num_threads(wrong)  # type: ignore[arg-type]
        assert lanewise.get_num_threads() == lanewise.info()["threads"] == 6
    lanewise.set_num_threads(np.int32(3))
    assert lanewise.get_num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "many", " 2", "+2", "0x2", "²"])
def test_the_environment_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANEWISE_NUM_THREADS", text)
    lanewise.set_num_threads(None)
    with pytest.raises(ValueError, match="LANEWISE_NUM_THREADS must be a whole number from 1 on, got"):
        lanewise.get_num_threads()
    lanewise.set_num_threads(2)
    assert lanewise.get_num_threads() == 2


def test_the_environment_counts_for_more_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quota, "usable_cpus", lambda: 5)
    for text, count in (("", 5), ("3", 3), ("12", 12)):
        monkeypatch.setenv("LANEWISE_NUM_THREADS", text)
        lanewise.set_num_threads(None)
        assert lanewise.get_num_threads() == count


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no process is pinned on this system")
def test_a_pinned_process_has_fewer_cpus() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert _quota.usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


V2 = "30 24 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 24 0:27 {top} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "32 24 0:28 {top} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)
OWN = {V2: "0::{path}\n", V1: "5:cpuset:/else\n4:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/\n"}


def made_up(root: Path, mounts: str, top: str, path: str, quotas: dict[str, str]) -> Path:
    """A file system whose control groups have these quotas, in the words of version 2."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/root rw\n" + mounts.format(top=top))
    (root / "proc/self/cgroup").write_text(OWN[mounts].format(path=path))
    for group, words in quotas.items():
        folder = root / "sys/fs/cgroup" / ("" if mounts is V2 else "cpu,cpuacct") / group
        folder.mkdir(parents=True, exist_ok=True)
        if mounts is V2:
            (folder / "cpu.max").write_text(words + "\n")
        else:
            quota, period = words.replace("max", "-1").split()
            (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
            (folder / "cpu.cfs_period_us").write_text(period + "\n")
    return root


@pytest.mark.parametrize("mounts", [V2, V1], ids=["version 2", "version 1"])
@pytest.mark.parametrize(
    ("top", "path", "quotas", "cpus"),
    [
        ("/", "/", {}, None),
        ("/", "/", {"": "200000 100000"}, 2),
        ("/", "/", {"": "max 100000"}, None),
        ("/", "/a/b", {"a/b": "max 100000", "a": "150000 100000", "": "max 100000"}, 2),
        ("/", "/a/b", {"a/b": "50000 100000", "a": "300000 100000"}, 1),
        ("/", "/a/b", {"a/b": "700000 100000", "a": "300000 50000"}, 6),
        ("/", "/a/b", {"c": "100000 100000", "a/b/c": "100000 100000"}, None),
        ("/docker/1", "/docker/1", {"": "400000 100000"}, 4),
        ("/docker/1", "/docker/1/a", {"": "400000 100000", "a": "100000 100000"}, 1),
        ("/docker/1", "/docker/12", {"": "400000 100000", "2": "100000 100000"}, 4),
        ("/kubepods/1", "/", {"": "400000 100000"}, 4),
        ("/", "/../..", {"": "400000 100000"}, 4),
        ("/", "/a", {"a": "", "": "300000 100000"}, 3),
        ("/", "/a", {"a": "many 100000", "": "300000 0"}, 300000),
    ],
)
def test_quotas(tmp_path: Path, mounts: str, top: str, path: str, quotas: dict[str, str], cpus: int | None) -> None:
    if mounts is V1:
        quotas = {group: words for group, words in quotas.items() if words}
    assert _quota.group_cpus(made_up(tmp_path, mounts, top, path, quotas)) == cpus


def test_both_versions_count(tmp_path: Path) -> None:
    made_up(tmp_path / "2", V2, "/", "/", {"": "300000 100000"})
    root = made_up(tmp_path / "1", V1, "/", "/", {"": "500000 100000"})
    hybrid = (root / "proc/self/mountinfo").read_text() + V2.format(top="/").replace("cgroup rw", "cgroup/unified rw")
    (root / "proc/self/mountinfo").write_text(hybrid)
    os.rename(tmp_path / "2/sys/fs/cgroup", root / "sys/fs/cgroup/unified")
    assert _quota.group_cpus(root) == 3


def test_files_that_no_kernel_writes(tmp_path: Path) -> None:
    root = made_up(tmp_path, V2, "/", "/", {"": "300000 100000"})
    for name, text in (("cgroup", "nothing\n"), ("mountinfo", "1 2 3 - cgroup2 x\n"), ("mountinfo", "\x00\xff")):
        before = (root / "proc/self" / name).read_text()
        (root / "proc/self" / name).write_text(text)
        assert _quota.group_cpus(root) is None
        (root / "proc/self" / name).write_text(before)
    assert _quota.group_cpus(root) == 3
    assert _quota.group_cpus(tmp_path / "nothing here") is None


def test_the_quota_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quota, "group_cpus", lambda root: 1)
    assert _quota.usable_cpus() == 1
    monkeypatch.setattr(_quota, "group_cpus", lambda root: 10**6)
    assert 1 <= _quota.usable_cpus() <= (os.cpu_count() or 1)
