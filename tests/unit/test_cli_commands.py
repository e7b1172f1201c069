"""The command ``slipstream`` as a whole: its words, its exit statuses, and what it does not import."""

import subprocess
import sys

import pytest

from services.cli import COMMANDS, main
from services.flags import EXIT_USAGE


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_command_all_commands_are_shown(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert set(COMMANDS) == {"up", "gateway", "scheduler", "worker", "convert", "healthcheck"}


def test_an_unknown_command_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve") == EXIT_USAGE
    assert capsys.readouterr().err == (
        "slipstream: unknown command 'serve': there are up, gateway, scheduler, worker, convert, healthcheck\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_refused_with_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("worker",) if command == "healthcheck" else ()
    assert run(monkeypatch, command, *words, "--colour") == EXIT_USAGE
    refusal = f"slipstream: unknown flag: --colour (slipstream {command} --help lists all flags)\n"
    assert capsys.readouterr().err == refusal


@pytest.mark.parametrize("command", ["healthcheck worker", "up --port 0"])
@pytest.mark.parametrize("url", ["gopher://x", "redis://127.0.0.1:1", "unix:///nowhere.sock"])
def test_a_redis_url_that_leads_nowhere_is_refused_with_one_line(command: str, url: str) -> None:
    line = [sys.executable, "-m", "services.cli", *command.split(), "--redis-url", url]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert ended.stderr.startswith("slipstream: ")
    assert ended.stderr.count("\n") == 1


def test_help_imports_no_service_and_nothing_heavy() -> None:
    script = "import sys, services.cli; print(*(m for m in sys.modules if m.split('.')[0] in {0}))"
    heavy = {"torch", "transformers", "aiohttp", "redis", "numpy"}
    ended = subprocess.run(
        [sys.executable, "-c", script.replace("{0}", repr(heavy))],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert ended.stdout.strip() == ""


def test_the_gateway_and_the_supervisor_never_import_torch() -> None:
    modules = "services.gateway.service, services.scheduler.service, services.local"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "False\n"
