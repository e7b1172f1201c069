"""From a command line to settings: what is taken, and in which words the rest is refused."""

import pytest

from services.flags import UsageError, parse
from shared.runtime.settings import (
    GatewaySettings,
    HealthcheckSettings,
    SchedulerSettings,
    UpSettings,
    WorkerSettings,
)


def test_flags_beat_variables_and_variables_beat_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_PORT", "8001")
    monkeypatch.setenv("SLIPSTREAM_MAX_QUEUE", "7")
    settings = parse(GatewaySettings, "gateway", ["--port", "8002"])
    assert (settings.port, settings.max_queue, settings.host) == (8002, 7, "127.0.0.1")


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_PORT", "")
    monkeypatch.setenv("SLIPSTREAM_KV", "")
    settings = parse(UpSettings, "up", [])
    assert (settings.port, settings.kv) == (8000, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "x"], "--port should be a valid integer, not 'x'"),
        (["--port=70000"], "--port should be less than or equal to 65535, not '70000'"),
        (["--port", "-1"], "--port should be greater than or equal to 0, not '-1'"),
        (["--kv", "foo"], "--kv should be 'paged' or 'reserve', not 'foo'"),
        (["--workers", "0"], "--workers should be greater than 0, not '0'"),
        (["--prot", "1"], "unknown flag: --prot 1"),
        (["--por", "1"], "unknown flag: --por 1"),
        (["word"], "unknown flag: word"),
        (["--model"], "argument --model: expected one argument"),
        (["--model", ""], "argument --model: must not be empty"),
        (
            ["--max-num-seqs", "600"],
            (
                "--max-num-seqs (600) must not be above --max-num-batched-tokens (512): "
                "each request takes a token of every step"
            ),
        ),
        (
            ["--port", "x", "--threads", "0"],
            "--threads should be greater than 0, not '0'; --port should be a valid integer, not 'x'",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence_that_names_the_flag(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(UpSettings, "up", arguments)
    assert str(error.value) == sentence


def test_a_wrong_variable_is_named_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_THREADS", "many")
    with pytest.raises(UsageError, match=r"^SLIPSTREAM_THREADS should be a valid integer, not 'many'$"):
        parse(WorkerSettings, "worker", [])


def test_a_long_value_is_shown_shortened() -> None:
    with pytest.raises(UsageError) as error:
        parse(UpSettings, "up", ["--served-model-name", "x" * 300])
    assert str(error.value) == f"--served-model-name should have at most 256 characters, not '{'x' * 80}…'"


def test_a_word_that_is_not_asked_for_is_named_by_its_place() -> None:
    with pytest.raises(UsageError, match=r"^KIND should be 'gateway', 'scheduler' or 'worker', not 'engine'$"):
        parse(HealthcheckSettings, "healthcheck", ["engine"])
    with pytest.raises(UsageError, match=r"^the following arguments are required: KIND$"):
        parse(HealthcheckSettings, "healthcheck", [])


def test_a_service_does_not_take_another_services_flags() -> None:
    with pytest.raises(UsageError, match="unknown flag: --port 1"):
        parse(SchedulerSettings, "scheduler", ["--port", "1"])


def test_help_groups_the_flags_and_shows_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(UpSettings, "up", ["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for expected in (
        "the gateway: --host str",
        "the scheduler: --policy {sarathi,orca,static,prefill-first,chunked-only,hybrid-only}",
        "a worker: --executor {torch,fake}",
        "--kv {paged,reserve} KV memory on demand, or reserved at admission (default: reserve for static and orca)",
        "(default: 30 % of free memory, at most 131,072) --memory-share",
        "(default: cores / workers) --fake-step-ms",
        "--port int port to listen on (0: any free one) (default: 8000)",
    ):
        assert expected in shown
    assert "%%" not in shown
    assert "null" not in shown
