"""The comparison with other systems: what is read from their bytes and lines, and how ratios are taken."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.company import Company, own_cpu_s
from tests.benchmarks.peer_figures import OURS, EngineFigure, Figure, pairs, read_engine, table
from tests.benchmarks.peers import streams_of
from tests.benchmarks.sessions import LeftOut, TimeLeft, session
from tests.benchmarks.streams import BadAnswer, read_answer
from tests.integration.processes import is_gone

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
UNCHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TEXT = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def figure(system: str, *, round_: int = 1, streams: int = 16, tokens_per_s: float = 100.0) -> Figure:
    return Figure("peer", system, round_, streams, tokens_per_s, step_ms=10.0)


def test_an_answer_in_chunks_is_timed_by_its_pieces_and_counted_by_its_usage() -> None:
    pieces = [
        (1.0, CHUNKED),
        (2.0, chunk(TEXT)),
        (2.5, chunk(TEXT)),
        (4.0, chunk(TEXT) + chunk(USAGE) + chunk(DONE) + chunk(b"")),
    ]
    answer = read_answer(0.5, pieces, 3)
    assert (answer.sent_s, answer.first_s, answer.end_s, answer.tokens) == (0.5, 2.0, 4.0, 3)
    assert answer.gaps_s == (0.5, 1.5)
    assert answer.per_token_s == 1.0


def test_an_answer_that_ends_with_its_connection_is_read_too() -> None:
    assert read_answer(0.0, [(1.0, UNCHUNKED + TEXT), (2.0, USAGE + DONE)], 3).tokens == 3


@pytest.mark.parametrize(
    ("received", "why"),
    [
        (UNCHUNKED + TEXT + USAGE, "without its end"),
        (UNCHUNKED + TEXT + DONE, "no event states the usage"),
        (UNCHUNKED + DONE, "no event states the usage"),
        (b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n\r\nfull", "status 429: b'full'"),
        (CHUNKED + chunk(TEXT) + b"30\r\ndata:", "not a whole HTTP answer"),
        (b"", "not a whole HTTP answer"),
    ],
)
def test_what_is_not_a_whole_answer_is_no_figure(received: bytes, why: str) -> None:
    with pytest.raises(BadAnswer, match=why):
        read_answer(0.0, [(1.0, received)], 3)


def test_an_answer_shorter_than_was_asked_for_is_no_figure() -> None:
    with pytest.raises(BadAnswer, match="3 tokens where 4 were asked for"):
        read_answer(0.0, [(1.0, UNCHUNKED + TEXT + USAGE + DONE)], 4)


def test_of_a_peer_in_process_the_last_line_of_a_batch_counts_and_other_lines_do_not() -> None:
    output = (
        "loading\nopenvino batch   1: decode step   18.6 ms,     30 tok/s\n"
        "openvino batch   1: decode step   18.0 ms,     53 tok/s\n"
        "continuous batch  16: decode step  213.7 ms,     52 tok/s\n"
        "static     batch  16: decode step 1234.5 ms,      0 tok/s\n"
    )
    assert read_engine(output) == [
        EngineFigure("openvino", 1, 18.0, 53.0),
        EngineFigure("continuous", 16, 213.7, 52.0),
    ]


def test_longer_outputs_cost_a_decode_step_for_each_token_more() -> None:
    one = EngineFigure("static", 16, step_ms=100.0, tokens_per_s=132.0)  # 66 tokens of each in 8 s
    assert one.at(66, 66) == pytest.approx(132.0)
    assert one.at(66, 128) == pytest.approx(16 * 128 / (8.0 + 6.2))


def test_ratios_are_of_medians_over_the_rounds_that_have_both() -> None:
    found = pairs(
        [
            figure("peer", round_=1, tokens_per_s=100.0),
            figure(OURS, round_=1, tokens_per_s=150.0),
            figure("peer", round_=2, tokens_per_s=120.0),
            figure(OURS, round_=2, tokens_per_s=240.0),
            figure("peer", round_=3, tokens_per_s=1.0),
            figure(OURS, round_=3, streams=64),
        ]
    )
    (pair,) = found
    assert pair.throughput_ratios == (1.5, 2.0)
    assert pair.medians("tokens_per_s") == (110.0, 195.0)
    assert pair.medians("per_token_ms") is None
    assert "| peer | 16 | 2 | 110 | 195 | 1.77 (1.50 to 2.00) | 10.0 | 10.0 | 1.00 |  |  |  |" in table(found)


def test_a_run_without_time_left_says_so() -> None:
    with pytest.raises(LeftOut, match="too little time"):
        TimeLeft(0.5).at_most(10.0)
    assert TimeLeft(5.0).at_most(100.0) <= 5.0


def test_a_session_ends_with_what_it_started_even_if_that_ignores_being_asked(tmp_path: Path) -> None:
    stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    stubborn += "; print(os.getpid(), flush=True); time.sleep(50)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    log = tmp_path / "log"
    with session([sys.executable, "-c", child], {}, log, grace_s=0.3) as running:
        pid = first_line(log)
        assert not is_gone(pid, within_s=0)
    assert running.process.returncode is not None
    assert is_gone(pid, within_s=0)


def first_line(log: Path) -> int:
    until_s = time.perf_counter() + 20
    while not log.read_text().endswith("\n"):
        assert time.perf_counter() < until_s
        time.sleep(0.01)
    return int(log.read_text())


def test_a_peer_is_measured_where_it_is_worth_it_and_slowly_only_if_asked_to() -> None:
    assert streams_of(["hf", "llamacpp"], None) == {"hf": (1, 16), "llamacpp": (1,)}
    assert streams_of(["hf", "llamacpp", "openvino"], [32, 64]) == {"hf": (64,), "openvino": (32, 64)}


BUSY = "import os, time; print(os.getpid(), flush=True)\nwhile time.process_time() < 0.5: pass"


def test_what_is_started_here_counts_as_ours_when_it_has_ended(tmp_path: Path) -> None:
    before_s = own_cpu_s()
    with session([sys.executable, "-c", BUSY], {}, tmp_path / "log") as running:
        running.process.wait(20)
    assert own_cpu_s() - before_s >= 0.4


def test_what_has_no_parent_here_is_company(tmp_path: Path) -> None:
    begun_s, company, log = time.perf_counter(), Company(), tmp_path / "log"
    with log.open("w") as out:
        subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, BUSY], stdout=out, check=True)
    assert is_gone(first_line(log), within_s=20)
    cores = company.cores()
    assert cores * (time.perf_counter() - begun_s) >= 0.4
