import json
from pathlib import Path

import pytest

from loadgen.step_times import ModelFile, bundled_models, load_model, write_model
from shared.simulation.model import StepLoad, StepTimeModel, tiles
from shared.simulation.records import Arrival, Setup
from shared.simulation.simulator import simulate
from shared.simulation.worker import padding_tokens


def prefill(tokens: int, start: int = 0) -> StepLoad:
    return StepLoad(tokens, prefill_read_tokens=start, prefill_pairs=tokens * start + tokens * (tokens + 1) // 2)


def decodes(rows: int, context: int) -> StepLoad:
    return StepLoad(rows, decode_rows=rows, decode_read_tokens=rows * context)


def test_the_table_is_flat_before_its_first_point_linear_between_and_goes_on_after_its_last() -> None:
    model = StepTimeModel(tokens_ms=((10, 5.0), (20, 10.0), (40, 14.0)))
    times = [model.step_ms(StepLoad(tokens)) for tokens in (0, 1, 10, 15, 20, 30, 40, 50)]
    assert times == [0, 5, 5, 7.5, 10, 12, 14, 16]
    assert StepTimeModel(tokens_ms=((8, 3.0),)).step_ms(StepLoad(1000)) == 3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens_ms": ()}, "tokens_ms: has no point"),
        ({"tokens_ms": ((0, 1.0),)}, "tokens_ms: point "),
        ({"tokens_ms": ((1, float("nan")),)}, "tokens_ms: point "),
        ({"tokens_ms": ((1, 2.0), (1, 3.0))}, "tokens_ms: .* must be to the right"),
        ({"tokens_ms": ((1, 2.0), (2, 1.0))}, "tokens_ms: .* not below"),
        ({"decode_rows_ms": ((0, 1.0),)}, "decode_rows_ms: no decodes add nothing"),
        ({"decode_read_ms_per_token": -1.0}, "decode_read_ms_per_token: must be 0 or more"),
        ({"prefill_pair_ms": float("inf")}, "prefill_pair_ms: must be 0 or more"),
        ({"tile_tokens": 0}, "tile_tokens: must be 1 or more"),
        ({"stages": 0}, "stages: must be 1 or more"),
        ({"kv_tokens": 0}, "kv_tokens: must be 1 or more"),
    ],
)
def test_a_model_that_makes_no_sense_names_the_field(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        StepTimeModel(**({"tokens_ms": ((1, 1.0),)} | fields))  # type: ignore[arg-type] # wrong on purpose


GOOD = {"format": "step-times/1", "name": "n", "source": "s", "tokens_ms": [[1, 2.0], [9, 4]]}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"format": "step-times/9"}, r"Invalid enum value 'step-times/9' - at `\$.format`"),
        ({"tokens_ms": [[1, "x"]]}, r"Expected `float`, got `str` - at `\$.tokens_ms\[0\]\[1\]`"),
        ({"tokens_ms": [[2, 1], [1, 1]]}, "tokens_ms: .* must be to the right"),
        ({"decode_read_ms_per_tokens": 1}, "unknown field `decode_read_ms_per_tokens`"),
        ({"name": None}, r"at `\$.name`"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_name_and_the_field(
    fields: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(GOOD | fields), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^model {path}: .*{sentence}"):
        load_model(path)


def test_what_is_written_is_read_again_and_nonsense_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    file = ModelFile("step-times/1", "mine", "a stop watch", ((1, 2.5), (64, 9.0)), kv_tokens=100)
    write_model(file, path)
    read = load_model(path)
    assert (read.name, read.source, read.model) == ("mine", "a stop watch", file.model())
    with pytest.raises(ValueError, match="tokens_ms: has no point"):
        write_model(ModelFile("step-times/1", "mine", "a stop watch", ()), tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def test_every_model_that_comes_along_says_where_it_comes_from_and_how_much_memory_it_has() -> None:
    assert bundled_models() == ("orca-175b", "sarathi-yi-34b", "smollm2-135m-2-cores")
    for name in bundled_models():
        known = load_model(name)
        assert known.name == name
        assert known.source
        assert known.model.kv_tokens


def test_orca_s_unloaded_latency_per_token_is_the_paper_s() -> None:
    model = load_model("orca-175b").model
    setup = Setup(model, kv_tokens=48_000, policy="orca", max_num_seqs=8, max_model_len=2048, stages=2)
    record = simulate(setup, [Arrival(0, 272, 64, 64)]).requests[0]
    assert record.e2e_s is not None
    assert record.e2e_s / 64 == pytest.approx(0.190 / 2, rel=0.02)


@pytest.mark.parametrize(
    ("load", "measured_ms"),
    [
        *((prefill(n), ms) for n, ms in ((128, 48.1), (512, 105.6), (1024, 214.3), (2048, 366.0), (4096, 757.6))),
        *((prefill(n), ms) for n, ms in ((8192, 1863.3), (16384, 4407.5))),
        *((decodes(n, 1022), ms) for n, ms in ((1, 46.8), (2, 47.5), (4, 48.8), (8, 69.7))),
        *((decodes(n, 1022), ms) for n, ms in ((16, 77.3), (32, 87.9), (64, 127.8), (128, 189.3))),
    ],
)
def test_yi_34b_takes_what_the_artefact_measured(load: StepLoad, measured_ms: float) -> None:
    assert load_model("sarathi-yi-34b").model.step_ms(load) == pytest.approx(measured_ms, rel=0.002)


@pytest.mark.parametrize(
    ("prompt", "chunk", "measured_ms"), [(2047, 512, 435.7), (8191, 512, 1958.5), (16383, 1024, 4357.6)]
)
def test_yi_34b_in_chunks_takes_about_what_figure_9_measured(prompt: int, chunk: int, measured_ms: float) -> None:
    model = load_model("sarathi-yi-34b").model
    setup = Setup(model, kv_tokens=32_768, max_num_batched_tokens=chunk, max_model_len=32_768)
    assert simulate(setup, [Arrival(0, prompt, 1, 1)]).span_s * 1000 == pytest.approx(measured_ms, rel=0.04)


def test_t27_a_tile_is_paid_whole() -> None:
    assert (tiles(256, 128), tiles(257, 128)) == (2, 3)
    model = StepTimeModel(tokens_ms=((128, 10.0), (256, 20.0), (384, 30.0)), tile_tokens=128)
    assert [model.step_ms(StepLoad(tokens)) for tokens in (1, 128, 129, 256, 257)] == [10, 10, 20, 20, 30]


def test_t41_a_prompt_in_a_padded_batch_of_decodes_wastes_a_rectangle() -> None:
    assert padding_tokens([100, *[1] * 7]) == (100 - 1) * (8 - 1) == 693
    assert padding_tokens([1] * 8) == 0
