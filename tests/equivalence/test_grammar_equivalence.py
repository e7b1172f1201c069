"""The default model in float32 with grammars: what it says is what was asked for, and who is free is left alone."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from services.gateway.grammars import WHITESPACE
from services.worker.executor import Loaded
from services.worker.loading import load_folder
from services.worker.model_store import model_folder
from services.worker.progress import Progress
from shared.protocol.messages import Sampling
from shared.runtime.settings import DEFAULT_MODEL, WorkerSettings
from shared.scheduling.limits import Limits
from tests.conductor import GREEDY, Conductor, Ids
from tests.equivalence.oracle import assert_equal_or_tie, reference_tokens
from tests.schemas import SCHEMAS, fits

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
REQUESTS, MAX_TOKENS = 20, 160
FREE, FREE_TOKENS = 6, 20
NAMES = [*SCHEMAS]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(DEFAULT_MODEL, Progress())


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_folder(folder, WorkerSettings(dtype="float32", kv_tokens=16_384, compile="off"), Progress())


@pytest.fixture(scope="module")
def tokenizer(loaded: Loaded) -> Tokenizer:
    return Tokenizer.from_buffer(loaded.tokenizer.tokenizer_json)


def prompt_of(tokenizer: Tokenizer, number: int) -> Ids:
    asked = f"Make up a {NAMES[number % len(NAMES)]}, number {number}. As JSON:"
    text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def sampling_of(number: int) -> Sampling:
    schema = SCHEMAS[NAMES[number % len(NAMES)]]
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE})
    return Sampling(temperature=float(number % 2), seed=number, grammar=grammar)


def conducted(loaded: Loaded, *, depth: int = 2, blocks: int | None = None) -> Conductor:
    return Conductor(loaded.executor, loaded.tokenizer.eos_ids, Limits(512, 64), depth=depth, blocks=blocks)


def test_answers_follow_their_schemas_unless_they_are_cut_and_free_rows_beside_them_are_as_they_were(
    folder: Path, loaded: Loaded, tokenizer: Tokenizer
) -> None:
    conductor = conducted(loaded)
    for number in range(REQUESTS):
        prompt = prompt_of(tokenizer, number)
        conductor.submit(f"json-{number}", prompt, MAX_TOKENS, sampling=sampling_of(number))
    free = {f"free-{number}": tuple(tokenizer.encode(f"Tale {number}: once").ids) for number in range(FREE)}
    for name, prompt in free.items():
        conductor.submit(name, prompt, FREE_TOKENS, sampling=GREEDY)
    conductor.run_dry()
    assert conductor.foreseen > 0
    finishes = []
    for number in range(REQUESTS):
        name = f"json-{number}"
        finishes.append(conductor.answers[name].finish)
        text = tokenizer.decode(list(conductor.text(name)))
        if finishes[-1] == "stop":
            assert fits(json.loads(text), SCHEMAS[NAMES[number % len(NAMES)]]), text
        else:
            assert (finishes[-1], len(conductor.text(name))) == ("length", MAX_TOKENS), text
    assert finishes.count("stop") >= 0.9 * REQUESTS
    ties = 0
    for name, prompt in free.items():
        expected = reference_tokens(folder, prompt, FREE_TOKENS)
        ties += assert_equal_or_tie(folder, prompt, conductor.text(name), expected) == "tie"
    assert not ties


def test_preemption_and_company_change_no_answer(loaded: Loaded, tokenizer: Tokenizer) -> None:
    numbers = (4, 9, 14, 0, 5)
    roomy, tight = conducted(loaded, depth=1), conducted(loaded, depth=2, blocks=13)
    for conductor in (roomy, tight):
        for number in numbers:
            prompt = prompt_of(tokenizer, number)
            conductor.submit(str(number), prompt, 45, sampling=sampling_of(number))
        conductor.run_dry()
    assert tight.preempted
    assert {n: roomy.text(str(n)) for n in numbers} == {n: tight.text(str(n)) for n in numbers}
