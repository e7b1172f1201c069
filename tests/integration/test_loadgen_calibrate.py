"""``loadgen calibrate`` against a whole system whose every step takes 20 ms."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.calibrate import as_file
from loadgen.calibrate_fit import decode_point, fit, prompt_point
from loadgen.calibrate_measure import Measurements
from loadgen.calibrate_settings import CalibrateSettings
from loadgen.cli import main
from loadgen.step_times import load_model, write_model
from shared.simulation.model import StepLoad
from tests.integration.processes import slipstream_up

STEP_MS = 20


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--executor", "fake", "--fake-step-ms", str(STEP_MS), "--max-num-seqs", "16")
    with slipstream_up(tmp_path_factory.mktemp("up"), *flags) as up:
        up.until_ready()
        host, port = up.address
        yield f"http://{host}:{port}"


@pytest.mark.slow
def test_steps_of_20_ms_are_measured_as_such_at_every_size(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.json"
    flags = ("--max-streams", "8", "--budget-s", "25", "--kv-tokens", "131072")
    assert main(["calibrate", "--url", url, "--out", str(out), *flags]) == 0
    printed, errors = capsys.readouterr()
    model = load_model(out).model
    assert model.kv_tokens == 131072
    for load in (StepLoad(1, 1, 20), StepLoad(8, 8, 8 * 20), StepLoad(8, 8, 8 * 1000), StepLoad(64), StepLoad(512)):
        assert STEP_MS * 0.9 <= model.step_ms(load) <= STEP_MS * 1.5, load
    assert "prompt of 512 tokens" in printed
    assert "prompt of 128 tokens beside 8 streams after 16 tokens of prompt: " in errors
    assert json.loads(out.read_text())["source"].startswith(f"loadgen calibrate of SmolLM2-135M-Instruct at {url}: ")


def test_without_time_nothing_is_written_and_the_reason_is_said(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.json"
    assert main(["calibrate", "--url", url, "--budget-s", "0.001", "--out", str(out)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1] == (
        "loadgen: nothing is written: too few points: 0 lengths of prompts and 1 sizes of batches, "
        "where 3 of each are needed"
    )
    assert "left out for want of time (--budget-s 0.001), prompt of 1 token; prompt of 2 tokens; " in errors[1]
    assert not out.exists()


def test_what_the_server_refuses_is_left_out_with_its_reason(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.json"
    flags = ("--step-tokens", "16", "--max-streams", "3", "--model", "another")
    assert main(["calibrate", "--url", url, "--out", str(out), *flags]) == 2
    assert "nothing can be measured: http_404: " in capsys.readouterr().err
    assert not out.exists()


def test_the_same_measurements_make_the_same_bytes_without_a_date(tmp_path: Path) -> None:
    points = [prompt_point(tokens, 8.25 + 0.4 * tokens, step_tokens=64) for tokens in (2, 8, 32, 64, 96, 192)]
    points += [decode_point(streams, 20, 5.0 + 0.7 * streams) for streams in (1, 2, 4, 8)]
    settings = CalibrateSettings(url="http://h:1", step_tokens=64)
    left_out = ("prompt of 1024 tokens: http_400: too long",)
    for name in ("one", "two"):
        measurements = Measurements("tiny", tuple(points), left_out)
        write_model(as_file(settings, measurements, fit(points)), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    file = json.loads((tmp_path / "one").read_text())
    assert file["source"].startswith(
        "loadgen calibrate of tiny at http://h:1: times of 6 prompts, 4 decode batches and 0 mixed steps, off by "
    )
    assert file["assumptions"] == [
        "A step has at most 64 tokens (--step-tokens).",
        "Batches of up to 64 streams were asked for, within 90 s.",
        f"A request takes {fit(points).overhead_ms:.1f} ms beyond the steps to its first token: no part of the model.",
        "Least squares of relative deviations, no number below 0.",
        "Left out: prompt of 1024 tokens: http_400: too long.",
        "What a decode's context costs was not measured and counts nothing.",
    ]
    assert file["decode_read_ms_per_token"] == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--max-streams", "2"), "--max-streams: "),
        (("--step-tokens", "8"), "--step-tokens: "),
        (("--url", "http://127.0.0.1:9"), "no answer from http://127.0.0.1:9"),
        (("--out", "/no/such/folder/steps.json"), "cannot write a file at /no/such/folder/steps.json"),
    ],
)
def test_wrong_flags_and_a_silent_server_end_in_one_sentence_and_status_2(
    flags: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = () if "--out" in flags else ("--out", str(tmp_path / "steps.json"))
    assert main(["calibrate", *defaults, *flags]) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert errors.count("\n") == 1


def test_ctrl_c_writes_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_at_the_first_line(line: str) -> int:
        if "1 stream after" in line:
            signal.raise_signal(signal.SIGINT)
        return len(line)

    monkeypatch.setattr(sys.stderr, "write", interrupt_at_the_first_line)
    out = tmp_path / "steps.json"
    assert main(["calibrate", "--url", url, "--out", str(out)]) == 130
    assert not out.exists()
    assert capsys.readouterr().out == ""


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in CalibrateSettings.model_fields.items():
        assert field.description
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description in shown
