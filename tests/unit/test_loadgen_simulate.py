import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.cli import main
from loadgen.simulate_lengths import LogNormal, draw_pairs, parse_length
from loadgen.simulate_settings import SimulateSettings
from loadgen.simulate_summary import summarise_simulation
from loadgen.simulate_workload import arrivals_of, workload_of
from shared.scheduling.policies import POLICIES
from shared.simulation.model import StepTimeModel
from shared.simulation.records import Arrival, Setup
from shared.simulation.simulator import simulate

LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,3,13,3.3\n20,4,24,5.0\n7,0,7,0\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [1, 2]}\n'
    '{"timestamp": 60000, "input_length": 1025, "output_length": 64, "hash_ids": [1, 2, 3]}\n'
)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--policy", "sarathi,best"), "loadgen: --policy: no 'best': one of static, orca, "),
        (("--policy", "orca,orca"), "names one twice"),
        (("--queue", "lifo"), "loadgen: --queue: no 'lifo': one of fcfs, priority, fair"),
        (("--kv", "swap"), "loadgen: --kv: no 'swap': one of paged, reserve, reserve-longest"),
        (("--rate", "0"), "loadgen: --rate: '0' must be different rates above 0"),
        (("--rate", "1,1"), "must be different rates"),
        (("--rate", "nan"), "must be different rates"),
        (("--rate", "fast"), "is not one or several numbers, like 0.5,1,2"),
        (("--requests", "0"), "loadgen: --requests: "),
        (("--prompt-tokens", "9-2"), "must start at 1"),
        (("--prompt-tokens", "lognormal:9"), "is not like lognormal:1730:5696"),
        (("--output-tokens", "lognormal:9:3"), "the 90th percentile above it"),
        (("--plan-depth", "5"), "loadgen: --plan-depth: "),
        (
            ("--model", "gpt-9"),
            "no model 'gpt-9': neither one of orca-175b, sarathi-yi-34b, smollm2-135m-2-cores nor a file",
        ),
        (("--lengths", "/no/such.csv"), "loadgen: /no/such.csv cannot be read"),
        (("--lengths", "a", "--trace", "b"), "--trace and --lengths exclude each other"),
        (("--trace", "b", "--arrivals", "at-once"), "--trace and --arrivals at-once exclude each other"),
        (("--scale-lengths", "1/3"), "loadgen: --scale-lengths: '1/3': lengths are scaled so that"),
        (("--scale-lengths", "much"), "loadgen: --scale-lengths: 'much': "),
        (("--padded",), "--padded is about static"),
        (("--stages", "2"), "--stages is about orca"),
        (("--max-num-seqs", "513"), "must fit into --max-num-batched-tokens"),
        (("--kv-tokens", "100"), "no request fits: the shortest has 192 tokens, 100 are served"),
        (("--max-model-len", "191"), "no request fits"),
        (("--out", "/dev/null/x"), "loadgen: cannot make a folder at /dev/null/x"),
    ],
)
def test_what_makes_no_sense_ends_in_one_sentence_and_status_2(
    flags: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = () if "--out" in flags else ("--out", str(tmp_path / "out"))
    assert main(["simulate", *defaults, *flags]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert sentence in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    for name, field in SimulateSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description
    assert "null" not in shown
    assert "Exit status" in shown


def run(folder: Path, *flags: str) -> dict[str, bytes]:
    assert main(["simulate", "--requests", "60", "--out", str(folder), *flags]) == 0
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("rates", ["2", "0.5,2"])
def test_same_flags_same_bytes(rates: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "static,sarathi", "--rate", rates, "--prompt-tokens", "lognormal:50:200:400", "--padded")
    once = run(tmp_path / "once", *flags)
    printed = capsys.readouterr().out
    assert once == run(tmp_path / "twice", *flags)
    assert printed == capsys.readouterr().out
    assert sorted(once) == ["latency.png", "simulation.json"]
    assert once["latency.png"].startswith(b"\x89PNG")


def test_another_seed_gives_another_result(tmp_path: Path) -> None:
    one, other = (run(tmp_path / seed, "--seed", seed, "--prompt-tokens", "1-200") for seed in ("1", "2"))
    assert all(one[name] != other[name] for name in one)


def test_the_table_and_the_file_say_what_every_policy_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = run(tmp_path, "--policy", ",".join(POLICIES), "--arrivals", "at-once", "--max-num-seqs", "8", "--padded")
    printed = capsys.readouterr().out
    result = json.loads(files["simulation.json"])
    assert [one["policy"] for one in result["runs"]] == list(POLICIES)
    assert "out" not in result["config"]
    for one in result["runs"]:
        assert one["policy"] in printed
        assert one["summary"]["finished"] == len(one["requests"]) == 60
        rows = [dict(zip(result["request_fields"], row, strict=True)) for row in one["requests"]]
        assert all(row["at_s"] == 0 < row["first_token_s"] < row["end_s"] for row in rows)
        assert max(row["end_s"] for row in rows) == pytest.approx(one["summary"]["span_s"], abs=1e-5)


def test_lengths_come_from_the_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS, encoding="utf-8")
    workload = workload_of(SimulateSettings(lengths=path, requests=50))
    assert {(row.prompt_tokens, row.output_tokens) for row in workload.rows} == {(10, 3), (20, 4)}
    assert len(workload.rows) == 50
    path.write_text("num_prefill_tokens,num_decode_tokens\n7,0\n", encoding="utf-8")
    assert main(["simulate", "--lengths", str(path), "--out", str(tmp_path / "o")]) == 2


def test_a_trace_is_replayed_at_its_times_and_finds_the_prefixes_that_it_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE, encoding="utf-8")
    flags = ("--trace", str(path), "--scale-lengths", "1/32", "--time-scale", "0.5")
    result = json.loads(run(tmp_path / "out", *flags)["simulation.json"])
    assert [row[:3] for row in result["runs"][0]["requests"]] == [[0.0, 32, 2], [30.0, 33, 2]]
    assert result["runs"][0]["summary"]["cached_share"] == pytest.approx(32 / 65)
    assert "49.2% of the prompt tokens were found in a prefix cache" in capsys.readouterr().out


def test_a_file_of_lengths_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS, encoding="utf-8")
    assert main(["simulate", "--trace", str(path), "--out", str(tmp_path / "o")]) == 2
    assert "has lengths and no times: give it as --lengths" in capsys.readouterr().err


def test_another_rate_stretches_the_same_gaps() -> None:
    settings = SimulateSettings(requests=20)
    workload = workload_of(settings)
    slow, fast = (arrivals_of(settings, workload, rate) for rate in (1.0, 4.0))
    assert [one.at_s for one in slow] == pytest.approx([4 * one.at_s for one in fast])


def test_max_tokens_is_asked_for_and_cuts_longer_answers() -> None:
    settings = SimulateSettings(requests=50, output_tokens="1-100", max_tokens=50)
    workload = workload_of(settings)
    arrivals = arrivals_of(settings, workload, 1.0)
    assert {one.max_tokens for one in arrivals} == {50}
    assert max(one.output_tokens for one in arrivals) == 50
    assert workload.notes[0].endswith("answers were cut at --max-tokens 50")


def test_requests_that_are_too_long_are_refused_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run(tmp_path, "--prompt-tokens", "1-200", "--max-model-len", "164")["simulation.json"])
    summary = result["runs"][0]["summary"]
    assert summary["refused"] == sum(row[1] > 100 for row in result["runs"][0]["requests"]) > 0
    assert summary["finished"] == 60 - summary["refused"]
    assert "requests are longer than what is served: refused" in capsys.readouterr().out


def test_a_lognormal_length_has_the_median_and_the_90th_percentile_that_it_is_given() -> None:
    length = parse_length("lognormal:7059:12985:16384")
    assert length == LogNormal(7059, 12985, 16384)
    drawn = [prompt for prompt, _ in draw_pairs(length, length, 20_000, np.random.default_rng(3))]
    assert np.percentile(drawn, 50) == pytest.approx(7059, rel=0.02)
    assert np.percentile(drawn, 90) == pytest.approx(12985, rel=0.02)
    assert max(drawn) == 16384


def test_a_summary_counts_as_one_does_by_hand() -> None:
    model = StepTimeModel(tokens_ms=((1, 10.0),))
    setup = Setup(model, kv_tokens=160, max_num_batched_tokens=8, max_num_seqs=2)
    summary = summarise_simulation(simulate(setup, [Arrival(1.0, 4, 3, 3), Arrival(1.015, 4, 1, 1)]))
    assert summary.ttft_s
    assert summary.tbt_s
    assert summary.normalised_s
    assert (summary.ttft_s.count, summary.tbt_s.count, summary.finished) == (2, 2, 2)
    assert summary.ttft_s.largest == pytest.approx(0.015)
    assert summary.tbt_s.p50 == pytest.approx(0.010)
    assert summary.normalised_s.mean == pytest.approx((0.010 + 0.015) / 2)
    assert summary.requests_per_s == pytest.approx(2 / 0.030)
    assert summary.output_tokens_per_s == pytest.approx(4 / 0.030)
    assert summary.kv_mean == pytest.approx((1 + 1 + 2) / 30)
    assert summary.kv_peak == pytest.approx(0.2)
