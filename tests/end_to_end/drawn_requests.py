"""Requests drawn from a seed over all parameters that change an answer, and some that must not."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.end_to_end.asking import CHAT, COMPLETIONS
from tests.end_to_end.with_tools import TIME, WEATHER
from tests.schemas import SCHEMAS

_VOCABULARY = 49_152
_FREQUENT_IDS = 600
"""Ids below this are bytes and short words: an answer is likely to have them."""
_TEXTS = (
    "The capital of France is",
    "Count: one, two, three,",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a",
    "Copy this: 👩‍🚀🇩🇪 日本語 ﷽ 👩‍🚀🇩🇪 日本語 ﷽ 👩‍🚀🇩🇪",
    "yes no yes no yes no yes no",
    "Ein Satz auf Deutsch:  Grüße aus  Köln,\n\n",
)
_STOPS = (".", ",", " the", "\n", "e", "two", "日", " and ", "never to be found", "a t", "👩‍🚀")
Fields = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """One request."""

    number: int
    path: str
    fields: Fields

    @property
    def can_stream(self) -> bool:
        """False where more answers are computed than told: which are told is known at the end."""
        return bool(self.fields.get("best_of", 1) <= self.fields.get("n", 1))

    @property
    def stream_options(self) -> Fields:
        """What its stream is to tell of usage: at the end, or in every chunk."""
        return {"include_usage": True, "continuous_usage_stats": self.number % 2 == 0}


def draw_requests(count: int, seed: int, max_tokens: int, *, with_tools: bool = False) -> list[Drawn]:
    """Return so many requests; each depends on the seed and its number alone, and on what the model's template has."""
    draws = (random.Random(f"{seed}/{number}") for number in range(count))
    return [_request(number, draw, max_tokens, with_tools=with_tools) for number, draw in enumerate(draws)]


def _request(number: int, draw: random.Random, max_tokens: int, *, with_tools: bool) -> Drawn:
    is_chat = draw.random() < 0.4
    most = draw.randint(1, max_tokens)
    fields = (_chat(draw, most) if is_chat else _completion(draw, most)) | {"seed": draw.randrange(-(2**63), 2**63)}
    for optional in (_sampling, _penalties, _biases, _ends, _labels):
        fields |= optional(draw)
    if draw.random() < 0.25:
        fields["min_tokens"] = draw.randint(0, most)
    if not is_chat and draw.random() < 0.3:
        fields |= _echo(draw)
    fields |= _tools(draw) if is_chat and with_tools and draw.random() < 0.4 else _format(draw)
    if is_chat and with_tools and draw.random() < 0.3:
        fields["chat_template_kwargs"] = {"enable_thinking": draw.random() < 0.5}
    return Drawn(number, CHAT if is_chat else COMPLETIONS, fields)


def _chat(draw: random.Random, most: int) -> Fields:
    turns = draw.choice((1, 1, 3))
    messages: list[Fields] = [
        {"role": ("user", "assistant")[turn % 2], "content": draw.choice(_TEXTS)} for turn in range(turns)
    ]
    if draw.random() < 0.3:
        messages.insert(0, {"role": draw.choice(("system", "developer")), "content": "You are terse."})
    if draw.random() < 0.2:
        messages[-1]["content"] = [{"type": "text", "text": text} for text in draw.sample(_TEXTS, 2)]
    fields = {"messages": messages, draw.choice(("max_tokens", "max_completion_tokens")): most}
    if draw.random() < 0.3:
        fields["n"] = draw.randint(1, 3)
    if draw.random() < 0.4:
        fields |= {"logprobs": True, "top_logprobs": draw.choice((0, 1, 5, 20))}
    return fields


def _completion(draw: random.Random, most: int) -> Fields:
    fields: Fields = {"prompt": _prompt(draw), "max_tokens": most}
    if draw.random() < 0.4:
        fields["n"] = draw.randint(1, 3)
    if draw.random() < 0.3:
        fields["best_of"] = fields.get("n", 1) + draw.randint(0, 2)
    if draw.random() < 0.4:
        fields["logprobs"] = draw.randint(0, 5)
    return fields


def _prompt(draw: random.Random) -> Any:
    kind = draw.choice(("text", "ids", "texts", "lists"))
    if kind == "text":
        return draw.choice(_TEXTS)
    if kind == "texts":
        return draw.sample(_TEXTS, draw.randint(1, 3))
    lists = [[draw.randrange(3, _VOCABULARY) for _ in range(draw.randint(1, 60))] for _ in range(draw.randint(1, 3))]
    return lists if kind == "lists" else lists[0]


def _sampling(draw: random.Random) -> Fields:
    optional = {
        "top_p": draw.choice((0.05, 0.5, 0.9, 1)),
        "top_k": draw.choice((-1, 0, 1, 5, 50)),
        "min_p": draw.choice((0, 0.05, 0.3, 1)),
    }
    fields: Fields = {name: value for name, value in optional.items() if draw.random() < 0.35}
    if draw.random() < 0.9:  # else the model's own
        fields["temperature"] = draw.choice((0, 0, 0.0001, 0.5, 0.8, 1, 1.5, 2))
    return fields


def _penalties(draw: random.Random) -> Fields:
    optional = {
        "presence_penalty": round(draw.uniform(-2, 2), 2),
        "frequency_penalty": round(draw.uniform(-2, 2), 2),
        "repetition_penalty": round(draw.uniform(0.8, 1.6), 2),
    }
    return {name: value for name, value in optional.items() if draw.random() < 0.25}


def _biases(draw: random.Random) -> Fields:
    if draw.random() > 0.25:
        return {}
    ids = draw.sample(range(_FREQUENT_IDS), draw.randint(1, 20))
    return {"logit_bias": {str(one): draw.choice((-100, -5, 1.5, 5, 10)) for one in ids}}


def _ends(draw: random.Random) -> Fields:
    fields: Fields = {}
    if draw.random() < 0.35:
        fields["stop"] = draw.choice((draw.choice(_STOPS), draw.sample(_STOPS, draw.randint(1, 4))))
    if draw.random() < 0.25:
        fields["stop_token_ids"] = draw.sample(range(_FREQUENT_IDS), draw.randint(1, 100))
    if draw.random() < 0.3:
        fields["ignore_eos"] = True
    return fields


def _labels(draw: random.Random) -> Fields:
    optional = {
        "user": "somebody",
        "priority": draw.randint(-100, 100),
        "cache_salt": str(draw.randrange(3)),
        "timeout": 3600,
        "metadata": {"of": "a test"},
    }
    return {name: value for name, value in optional.items() if draw.random() < 0.2}


def _echo(draw: random.Random) -> Fields:
    """Repeat the prompt, perhaps with what its tokens' logprobs are, and perhaps nothing more."""
    fields: Fields = {"echo": True}
    if draw.random() < 0.5:
        fields["logprobs"] = draw.randint(0, 5)
    if draw.random() < 0.3:
        fields |= {"max_tokens": 0, "min_tokens": 0}
    return fields


def _format(draw: random.Random) -> Fields:
    if draw.random() > 0.25:
        return {}
    kind = draw.choice(("text", "json_object", "json_schema", "json_schema", "json_schema"))
    if kind != "json_schema":
        return {"response_format": {"type": kind}}
    name: str = draw.choice(sorted(SCHEMAS))
    return {"response_format": {"type": kind, "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}}


def _tools(draw: random.Random) -> Fields:
    functions: Sequence[Fields] = draw.choice(((WEATHER,), (TIME,), (WEATHER, TIME)))
    is_strict = draw.random() < 0.5
    named = {"type": "function", "function": {"name": draw.choice(functions)["name"]}}
    fields: Fields = {
        "tools": [{"type": "function", "function": function | {"strict": is_strict}} for function in functions],
        "tool_choice": draw.choice(("none", "auto", "auto", "required", named, named)),
    }
    if draw.random() < 0.5:
        fields["parallel_tool_calls"] = draw.random() < 0.5
    return fields
