from pathlib import Path

import pytest
from pydantic import ValidationError

from loadgen import entry
from loadgen.cli import main
from loadgen.lengths import Span
from loadgen.settings import DEFAULT_CONCURRENCY, RunSettings


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--rate", "1", "--concurrency", "2"), "loadgen: --rate and --concurrency exclude each other"),
        (("--prompt-tokens", "9-2"), "loadgen: --prompt-tokens: '9-2' must start at 1"),
        (("--output-tokens", "many"), "loadgen: --output-tokens: 'many' is neither"),
        (("--url", "127.0.0.1:8000"), "loadgen: --url: '127.0.0.1:8000' is not like http://"),
        (("--url", "ftp://127.0.0.1"), "is not like http://"),
        (("--url", "http://127.0.0.1:99999"), "is not like http://"),
        (("--requests", "0"), "loadgen: --requests: "),
        (("--rate", "fast"), "loadgen: --rate: "),
        (("--cancel-share", "1.5"), "loadgen: --cancel-share: "),
        (("--out", "/no/such/folder/r.json"), "loadgen: cannot write a file at /no/such/folder/r.json"),
        (("--url", "http://127.0.0.1:9"), "loadgen: no answer from http://127.0.0.1:9"),
    ],
)
def test_wrong_flags_and_a_silent_server_end_in_one_sentence_and_status_2(
    flags: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = () if "--out" in flags else ("--out", str(tmp_path / "r.json"))
    assert main(["run", *defaults, *flags]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert sentence in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "r.json").exists()


def test_several_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--requests", "0", "--timeout-s", "soon"]) == 2
    errors = capsys.readouterr().err
    assert "--requests: " in errors
    assert "--timeout-s: " in errors


@pytest.mark.parametrize("arguments", [["run", "--no-such-flag"], ["sing"], ["run", "--rate"]])
def test_what_does_not_exist_is_refused_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert ": error: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_the_commands_that_there_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert "send requests and measure the answers" in capsys.readouterr().out


def test_help_of_run_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    for name, field in RunSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description
        assert field.description.split()[0] in shown
    assert "null" not in shown
    assert "Exit status" in shown


def test_no_variable_of_the_environment_changes_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUN", '{"rate": 3}')
    assert main(["run", "--concurrency", "2", "--url", "http://127.0.0.1:9"]) == 2
    assert "no answer" in capsys.readouterr().err


def test_the_defaults_are_a_bounded_closed_loop_of_exact_lengths() -> None:
    settings = RunSettings()
    assert (settings.rate, settings.sessions) == (None, DEFAULT_CONCURRENCY)
    assert settings.workload.prompt_tokens == Span(128, 128)
    assert settings.workload.output_tokens == Span(64, 64)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_url_may_end_as_users_write_it(url: str) -> None:
    assert RunSettings(url=url).url == "http://h:1"
    assert RunSettings(url=url).target("m").address == "http://h:1/v1/completions"
    assert RunSettings(url=url, endpoint="chat").target("m").address == "http://h:1/v1/chat/completions"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        RunSettings().requests = 3  # type: ignore[misc] # that it cannot is what is tested


def test_an_interruption_while_the_packages_are_loaded_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("loadgen.cli.main", interrupted)
    assert entry.main() == entry.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "loadgen: interrupted\n"
