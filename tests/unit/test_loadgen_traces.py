import gzip
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from loadgen.trace_formats import BadTrace, TraceRequest
from loadgen.trace_prefixes import PrefixHits, PromptMaker, look_up
from loadgen.traces import Reshape, Trace

LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.32\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799609,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,0\n"
    "2023-11-16 18:17:05.9799600,110,27\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1025, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 700, "output_length": 33, "hash_ids": [0, 9]}\n'
    '{"timestamp": 6500, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 7]}\n'
)

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        data = text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return written


def test_a_file_of_lengths_has_no_times(write: Write) -> None:
    trace = Trace(write("lengths.csv", LENGTHS))
    assert [*trace] == [TraceRequest(None, 74, 918), TraceRequest(None, 290, 905)]
    assert str(trace.counts) == "2 of 2 rows, 0 without output skipped, 0 clipped"


def test_azure_counts_from_its_first_row_cuts_the_seventh_digit_and_skips_requests_without_output(
    write: Write,
) -> None:
    trace = Trace(write("azure.csv", AZURE))
    assert [*trace] == [
        TraceRequest(0.0, 4808, 10),
        TraceRequest(2.0, 110, 27),  # .9799609 and .9799600 are one microsecond
    ]
    assert (trace.counts.rows, trace.counts.requests, trace.counts.without_output) == (3, 2, 1)


@pytest.mark.parametrize("stamp", ["2023-11-16 18:17:05.97", "2023-11-16T18:17:05.9799600Z", "2023-11-16 18:17:05"])
def test_other_spellings_of_a_time_are_read(write: Write, stamp: str) -> None:
    requests = [*Trace(write("azure.csv", AZURE + f"{stamp.replace(':05', ':06')},3,4\n"))]
    assert requests[-1].at_s == pytest.approx(3.0, abs=1.0)


@pytest.mark.parametrize("name", ["mooncake.jsonl", "mooncake.jsonl.gz"])
def test_mooncake_counts_milliseconds_and_names_the_blocks_of_its_prompts(write: Write, name: str) -> None:
    assert [*Trace(write(name, MOONCAKE))] == [
        TraceRequest(0.0, 1025, 500, (0, 1, 2)),
        TraceRequest(0.0, 700, 33, (0, 9)),
        TraceRequest(3.5, 1100, 1, (0, 1, 7)),
    ]


def test_windows_line_ends_a_byte_order_mark_and_blank_lines_do_no_harm(write: Write) -> None:
    path = write("lengths.csv", "\ufeff" + LENGTHS.replace("\n", "\r\n") + "\r\n")
    assert len([*Trace(path)]) == 2


def test_rows_are_read_as_they_are_asked_for(write: Write) -> None:
    requests = iter(Trace(write("lengths.csv", LENGTHS + "broken\n")))
    assert next(requests).prompt_tokens == 74
    assert next(requests).prompt_tokens == 290
    with pytest.raises(BadTrace):
        next(requests)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LENGTHS + "7\n", "line 4: 1 columns where 2 are needed"),
        (LENGTHS + "\n7,-1,6,2\n", "line 5: '-1' is not a number of tokens"),
        (LENGTHS + "0,3,3,0\n", "line 4: a prompt of 0 tokens"),
        (AZURE + "yesterday,3,4\n", "line 5: Invalid isoformat string: 'yesterday'"),
        (AZURE + "2023-11-16 18:17:05.5,3,4\n", "line 5: earlier than the row above it"),
        (MOONCAKE + '{"timestamp": 7000}\n', "line 4: Object missing required field `input_length`"),
        (MOONCAKE + '{"timestamp": 7000,\n', "line 4: Input data was truncated"),
        (
            MOONCAKE + '{"timestamp": 7000, "input_length": 513, "output_length": 1, "hash_ids": [0]}\n',
            "line 4: 1 hash ids where 513 tokens make 2 blocks",
        ),
        ("when,what\n1,2\n", "line 1: neither a trace of Azure or Mooncake nor a file of lengths begins 'when,what'"),
        ("", "has no rows"),
        (LENGTHS.partition("\n")[0], "has no rows"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(write: Write, text: str, sentence: str) -> None:
    path = write("trace", text)
    with pytest.raises(BadTrace) as told:
        list(Trace(path))
    assert str(told.value).startswith(str(path))
    assert sentence in str(told.value)


def test_what_is_no_text_or_no_gzip_or_not_there_is_one_sentence(write: Write, tmp_path: Path) -> None:
    latin = tmp_path / "latin.csv"
    latin.write_bytes(LENGTHS.encode() + b"7,\xe9\n")
    with pytest.raises(BadTrace, match=r"latin.csv cannot be read after line 0: 'utf-8' codec"):
        list(Trace(latin))
    plain = write("plain.jsonl", MOONCAKE).rename(tmp_path / "plain.jsonl.gz")
    with pytest.raises(BadTrace, match="cannot be read after line 0: Not a gzipped file"):
        list(Trace(plain))
    cut = write("cut.jsonl.gz", MOONCAKE)
    cut.write_bytes(cut.read_bytes()[:-12])
    with pytest.raises(BadTrace, match="cannot be read after line"):
        list(Trace(cut))
    with pytest.raises(BadTrace, match="No such file"):
        list(Trace(tmp_path / "absent"))


def test_lengths_are_scaled_rounding_up_and_hash_blocks_with_them(write: Write) -> None:
    reshape = Reshape(scale_lengths=Fraction(1, 32))
    trace = Trace(write("mooncake.jsonl", MOONCAKE), reshape)
    assert reshape.block_tokens == 16
    assert [(r.prompt_tokens, r.output_tokens, len(r.hash_ids)) for r in trace] == [(33, 16, 3), (22, 2, 2), (35, 1, 3)]
    assert trace.counts.clipped == 0


def test_clipping_comes_after_scaling_cuts_hash_ids_too_and_is_counted(write: Write) -> None:
    reshape = Reshape(scale_lengths=Fraction(1, 32), max_prompt_tokens=32, max_output_tokens=10)
    trace = Trace(write("mooncake.jsonl", MOONCAKE), reshape)
    for _ in range(2):  # a second pass counts anew
        assert [r[1:] for r in trace] == [(32, 10, (0, 1)), (22, 2, (0, 9)), (32, 1, (0, 1))]
        assert (trace.counts.requests, trace.counts.clipped) == (3, 2)


def test_a_time_scale_of_two_plays_a_trace_half_as_fast(write: Write) -> None:
    trace = Trace(write("mooncake.jsonl", MOONCAKE), Reshape(time_scale=2.0))
    assert [request.at_s for request in trace] == [0.0, 0.0, 7.0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"time_scale": 0.0}, "above 0"),
        ({"scale_lengths": Fraction(-1)}, "above 0"),
        ({"max_output_tokens": 0}, "1 token or more"),
        ({"scale_lengths": Fraction(1, 3)}, "512 tokens stay whole"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Reshape(**wrong)  # type: ignore[arg-type] # one wrong field at a time


def test_hits_are_leading_blocks_seen_before(write: Write) -> None:
    # the second request finds block 0, the third blocks 0 and 1; a seen block behind a new one is no hit
    assert look_up(Trace(write("mooncake.jsonl", MOONCAKE))) == PrefixHits(3, 8, 3)
    behind_a_new_one = [TraceRequest(0.0, 1024, 1, (1, 2)), TraceRequest(0.0, 1024, 1, (3, 2))]
    assert look_up(behind_a_new_one).hits == 0
    assert look_up(behind_a_new_one + behind_a_new_one).hit_rate == 0.5
    assert look_up([]).hit_rate == 0.0


def test_prompts_are_alike_exactly_as_far_as_their_hash_ids(write: Write) -> None:
    trace = Trace(write("mooncake.jsonl", MOONCAKE), Reshape(scale_lengths=Fraction(1, 32)))
    maker = PromptMaker(trace.reshape.block_tokens, seed=5)
    first, second, third = (maker.prompt(request) for request in trace)
    assert (len(first), len(second), len(third)) == (33, 22, 35)
    assert first[:16] == second[:16] == third[:16]
    assert first[:32] == third[:32]
    assert first[16:22] != second[16:]
    assert first == PromptMaker(16, seed=5).prompt(next(iter(trace)))
    assert first != PromptMaker(16, seed=6).prompt(next(iter(trace)))


def test_prompts_without_hash_ids_are_like_no_other() -> None:
    maker = PromptMaker(16, seed=1)
    request = TraceRequest(None, 20, 1)
    prompts = {maker.prompt(request) for _ in range(50)}
    assert {len(prompt) for prompt in prompts} == {20}
    assert len(prompts) == 50
