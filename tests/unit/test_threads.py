"""Threads that end with the process, and do otherwise what those of `concurrent.futures` do."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import wait

import pytest

from shared.runtime.threads import Threads

WAIT_S = 10.0
IDLE = """
import sys
from shared.runtime.threads import end_process
sys.stdout.write("said")
end_process(3)
"""
BUSY = """
import sys
import threading
from shared.runtime.threads import Threads, end_process
begun = threading.Event()
def work():
    begun.set()
    threading.Event().wait()
Threads(1, "t").submit(work)
assert begun.wait(10)
sys.stdout.write("said")
end_process(3)
"""


def test_as_many_threads_are_made_as_there_may_be_however_much_is_submitted() -> None:
    count, threads, full, go_on = 3, Threads(3, "bounded"), threading.Event(), threading.Event()
    at_work: set[int] = set()

    def work(number: int) -> tuple[int, int]:
        at_work.add(threading.get_ident())
        if len(at_work) == count:
            full.set()
        assert go_on.wait(WAIT_S)
        return number, threading.get_ident()

    futures = [threads.submit(work, number) for number in range(count)]
    assert full.wait(WAIT_S), "all of them are at work"
    futures += [threads.submit(work, count + number) for number in range(20)]
    made = [thread.name for thread in threading.enumerate() if thread.name.startswith("bounded_")]
    go_on.set()
    numbers, idents = zip(*(future.result(WAIT_S) for future in futures), strict=True)
    assert numbers == tuple(range(count + 20)), "each tells its own result"
    assert len(made) == count
    assert set(idents) == at_work
    assert len(at_work) == count


def test_two_run_beside_each_other() -> None:
    threads, meeting = Threads(2, "t"), threading.Barrier(2, timeout=WAIT_S)
    assert len(wait([threads.submit(meeting.wait) for _ in range(2)], WAIT_S).done) == 2
    assert not meeting.broken


def test_an_error_is_told_and_ends_no_thread() -> None:
    threads = Threads(1, "t")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(WAIT_S)
    assert threads.submit(lambda: "next").result(WAIT_S) == "next"


def test_what_is_cancelled_before_its_turn_is_not_begun() -> None:
    threads, go_on = Threads(1, "t"), threading.Event()
    done: list[str] = []
    first = threads.submit(go_on.wait, WAIT_S)
    second = threads.submit(done.append, "second")
    assert second.cancel()
    go_on.set()
    assert first.result(WAIT_S)
    threads.submit(done.append, "third").result(WAIT_S)
    assert done == ["third"]


def test_the_threads_go_when_nobody_has_them_any_more_and_keep_nothing_of_what_they_did() -> None:
    class Thing:
        pass

    threads, thing = Threads(1, "t"), Thing()
    (ident,) = {threads.submit(lambda _: threading.get_ident(), thing).result(WAIT_S)}
    thread = next(one for one in threading.enumerate() if one.ident == ident)
    kept = weakref.ref(thing)
    del thing, threads
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert kept() is None


def test_nothing_is_taken_once_the_threads_have_been_let_go_and_what_was_taken_before_is_done() -> None:
    threads, go_on = Threads(1, "t"), threading.Event()
    first, second = threads.submit(go_on.wait, WAIT_S), threads.submit(lambda: "second")
    threads.shutdown()
    threads.shutdown()
    with pytest.raises(RuntimeError, match="t: the threads have been let go"):
        threads.submit(lambda: "third")
    go_on.set()
    assert (first.result(WAIT_S), second.result(WAIT_S)) == (True, "second")


def run_to_its_end(script: str, *, stdout: int, stderr: int) -> subprocess.CompletedProcess[str]:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, timeout=WAIT_S, text=True, check=False, stdout=stdout, stderr=stderr, env=buffered)


def test_a_process_ends_at_once_with_its_status_and_all_it_said_whatever_its_threads_do() -> None:
    ended = run_to_its_end(BUSY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "said", "")


@pytest.mark.parametrize("script", [BUSY, IDLE], ids=["busy", "idle"])
def test_a_process_ends_with_its_status_though_nobody_reads_what_it_says(script: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        to_nobody = run_to_its_end(script, stdout=writing, stderr=subprocess.PIPE)
        errors_to_nobody = run_to_its_end(
            script.replace("sys.stdout", "sys.stderr"), stdout=subprocess.PIPE, stderr=writing
        )
    finally:
        os.close(writing)
    assert (to_nobody.returncode, to_nobody.stderr) == (3, "")
    assert (errors_to_nobody.returncode, errors_to_nobody.stdout) == (3, "")
