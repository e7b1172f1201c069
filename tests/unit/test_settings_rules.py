"""Defaults that depend on other settings, and the name under which a model is served."""

import pytest

from services.parts import cores, service_parts, threads_per_worker
from services.scheduler.leading import planner_of
from services.supervision import Part
from shared.paging.reservation import KV_MANAGERS
from shared.runtime.settings import DEFAULT_MODEL, SchedulerSettings, UpSettings, WorkerSettings, derived_model_name
from shared.scheduling.limits import Limits
from shared.scheduling.orders.fair import Fair
from shared.scheduling.policies import POLICIES


@pytest.mark.parametrize(("budget", "asked", "sequences"), [(512, None, 64), (16, None, 16), (16, 8, 8), (64, 64, 64)])
def test_requests_per_step_never_exceed_its_tokens(budget: int, asked: int | None, sequences: int) -> None:
    assert SchedulerSettings(max_num_batched_tokens=budget, max_num_seqs=asked).sequences == sequences


@pytest.mark.parametrize(("policy", "manager"), [("sarathi", "paged"), ("orca", "reserve"), ("static", "reserve")])
def test_each_policy_has_its_own_kv_manager_unless_told_otherwise(policy: str, manager: str) -> None:
    assert SchedulerSettings.model_validate({"policy": policy}).kv_manager == manager
    assert SchedulerSettings.model_validate({"policy": policy, "kv": "paged"}).kv_manager == "paged"


@pytest.mark.parametrize("other", [{"compile": "off"}, {"executor": "fake"}])
def test_weights_in_int8_are_refused_where_they_would_change_nothing(other: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="weights"):
        WorkerSettings.model_validate({"weights": "int8", **other})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (DEFAULT_MODEL, "SmolLM2-135M-Instruct"),
        ("pypi:some-model==1.0", "some-model"),
        ("/models/tiny/", "tiny"),
        ("./tiny.gguf", "tiny"),
        ("owner/model", "owner/model"),
    ],
)
def test_a_model_that_was_given_no_name_has_one(model: str, name: str) -> None:
    assert derived_model_name(model) == name
    assert WorkerSettings(model=model).model_name == name
    assert WorkerSettings(model=model, served_model_name="mine").model_name == "mine"


def test_workers_share_the_cores_but_each_has_one() -> None:
    assert threads_per_worker(UpSettings(workers=1)) == cores()
    assert threads_per_worker(UpSettings(workers=cores() * 3)) == 1
    assert threads_per_worker(UpSettings(workers=2, threads=5)) == 5


def _parts(settings: UpSettings) -> dict[str, Part]:
    gateway, inner = service_parts(settings, redis_url="unix:///here.sock", port=1234)
    return {part.name: part for part in (*inner, gateway)}


def test_parts_get_every_setting_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_PORT", "1")
    monkeypatch.setenv("SLIPSTREAM_CACHE", "kept: it is no setting")
    settings = UpSettings(workers=2, policy="orca", max_queue=9, drain_s=1.5, model="a model")
    parts = _parts(settings)
    assert list(parts) == ["scheduler", "worker 1", "worker 2", "gateway"]
    environment = parts["worker 2"].environment
    assert environment == parts["gateway"].environment == parts["scheduler"].environment
    shown = {name.removeprefix("SLIPSTREAM_"): value for name, value in environment.items() if "SLIPSTREAM" in name}
    expected = {
        "CACHE": "kept: it is no setting",
        "PORT": "1234",
        "REDIS_URL": "unix:///here.sock",
        "POLICY": "orca",
        "MAX_QUEUE": "9",
        "DRAIN_S": "1.5",
        "MODEL": "a model",
        "MEMORY_SHARE": "2",
        "THREADS": str(max(1, cores() // 2)),
    }
    assert {name: shown[name] for name in expected} == expected
    assert "MAX_NUM_SEQS" not in shown


def test_a_single_worker_has_no_number_and_a_given_memory_share_stays() -> None:
    parts = _parts(UpSettings(memory_share=4))
    assert list(parts) == ["scheduler", "worker", "gateway"]
    assert parts["worker"].environment["SLIPSTREAM_MEMORY_SHARE"] == "4"


def test_commands_are_those_a_person_would_type() -> None:
    commands = {name: part.command[-3:] for name, part in _parts(UpSettings()).items()}
    assert commands == {name: ("-m", "services.cli", name) for name in ("scheduler", "worker", "gateway")}


def test_the_planner_is_made_as_the_settings_say() -> None:
    settings = SchedulerSettings.model_validate(
        {"policy": "orca", "queue": "fair", "kv": "paged", "max_num_batched_tokens": 100, "max_num_seqs": 7}
        | {"long_prefill_tokens": 30, "tile_tokens": 8}
    )
    planner = planner_of(settings)
    assert planner.policy is POLICIES["orca"]
    assert planner.kv is KV_MANAGERS["paged"]
    assert isinstance(planner.state.line, Fair)
    assert planner.limits == Limits(100, 7, long_prefill_tokens=30, tile_tokens=8)


@pytest.mark.parametrize(("asked", "cap"), [(None, 256), (0, 0), (100, 100)])
def test_long_prompts_share_half_a_step_unless_told_otherwise(asked: int | None, cap: int) -> None:
    assert SchedulerSettings(long_prefill_tokens=asked).long_prefill_cap == cap


def test_requests_must_fit_into_the_whole_tiles_of_a_step() -> None:
    assert SchedulerSettings(max_num_batched_tokens=100, tile_tokens=90).sequences == 64
    assert SchedulerSettings(max_num_batched_tokens=60, tile_tokens=40).sequences == 40
    with pytest.raises(
        ValueError, match=r"--max-num-seqs \(50\) must not be above the 40 tokens .* --tile-tokens \(40\)"
    ):
        SchedulerSettings(max_num_batched_tokens=60, tile_tokens=40, max_num_seqs=50)
