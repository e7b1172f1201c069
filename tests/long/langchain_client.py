"""LangChain's ChatOpenAI against `slipstream up`, unchanged: whole, streamed, structured, tools, logprobs.

Run by hand, with the Python of an environment of its own that has ``langchain-openai`` (1.7 or later):
``python -m tests.long.langchain_client /tmp/lc/bin/python``. It starts the default model, then the same with a template
that knows tools, and has that Python run this file against each. Prints a line for each case; exits non-zero if any
fails.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France?"
SENTENCE = "The capital of France is Paris."
PERSON = {
    "title": "person",
    "description": "A person.",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "sex": {"enum": ["f", "m"]}},
    "required": ["name", "sex"],
    "additionalProperties": False,
}
WEATHER = {
    "title": "get_weather",
    "description": "The weather in a city.",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK = "The weather in Paris?"


class Cases:
    """What LangChain asks for, and what must come of it."""

    def __init__(self, url: str, model: str) -> None:
        from langchain_openai import ChatOpenAI  # noqa: PLC0415 - only the other environment has it

        self.chat = ChatOpenAI(
            model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120, temperature=0
        )

    async def whole(self) -> None:
        assert self.chat.invoke(QUESTION).content == SENTENCE
        answer = await self.chat.ainvoke(QUESTION)
        assert answer.content == SENTENCE
        assert answer.usage_metadata["output_tokens"] == 8
        assert answer.response_metadata["finish_reason"] == "stop"

    async def streamed(self) -> None:
        assert "".join(chunk.content for chunk in self.chat.stream(QUESTION)) == SENTENCE
        chunks = [chunk async for chunk in self.chat.astream(QUESTION, stream_usage=True)]
        assert "".join(chunk.content for chunk in chunks) == SENTENCE
        assert len(chunks) > 8
        assert [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata] == [8]

    async def batched(self) -> None:
        answers = await self.chat.abatch([QUESTION] * 4)
        assert [answer.content for answer in answers] == [SENTENCE] * 4

    async def logprobs(self) -> None:
        told = self.chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
        assert "".join(one["token"] for one in told) == SENTENCE
        assert all(len(one["top_logprobs"]) == 2 for one in told)

    async def structured(self) -> None:
        for strict in (None, True):
            asked = self.chat.with_structured_output(PERSON, method="json_schema", strict=strict)
            for person in (asked.invoke("Make up a person."), await asked.ainvoke("Make up a person.")):
                assert isinstance(person["name"], str)
                assert person["sex"] in {"f", "m"}

    async def no_tools(self) -> None:
        try:
            self.chat.bind_tools([WEATHER]).invoke(ASK)
        except Exception as error:  # noqa: BLE001 - LangChain's own, made of OpenAI's
            assert "this model's chat template has no tools" in str(error)  # noqa: PT017 - there is no pytest there
        else:
            raise AssertionError("tools that the model is never told of")

    async def tools(self) -> None:
        for choice in ("any", "get_weather"):
            asked = self.chat.bind_tools([WEATHER], tool_choice=choice, strict=True, parallel_tool_calls=False)
            answer = await asked.ainvoke(ASK)
            (call,) = answer.tool_calls
            assert (call["name"], list(call["args"])) == ("get_weather", ["city"])
            first, *rest = asked.stream(ASK)
            total: Any = sum(rest, start=first)
            assert [(one["name"], one["args"]) for one in total.tool_calls] == [(call["name"], call["args"])]
            came = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            again = self.chat.bind_tools([WEATHER], tool_choice="none").bind(max_tokens=20)
            assert again.invoke([("user", ASK), answer, came]).content
        person = self.chat.with_structured_output(PERSON, method="function_calling", strict=True)
        assert set(person.invoke("Make up a person.")) == {"name", "sex"}


async def run(url: str, model: str, names: list[str]) -> bool:
    """Run cases in one loop, as LangChain keeps its connections; say how each went."""
    cases = Cases(url, model)
    passed = []
    for name in names:
        case: Callable[[], Awaitable[None]] = getattr(cases, name)
        try:
            await case()
        except Exception as error:  # noqa: BLE001 - the other cases are run all the same
            print(f"{model}, {name}: FAILED, {type(error).__name__}: {error}", flush=True)
            passed.append(False)
        else:
            print(f"{model}, {name}: as it should be", flush=True)
            passed.append(True)
    return all(passed)


def serve_and_run(python: str) -> int:
    """Serve the default model and one with tools, and run this file with the other environment's Python."""
    from services.worker.model_store import model_folder  # noqa: PLC0415 - the other environment has none of it
    from services.worker.progress import Progress  # noqa: PLC0415
    from shared.runtime.settings import DEFAULT_MODEL  # noqa: PLC0415
    from tests.end_to_end import with_tools  # noqa: PLC0415
    from tests.integration.processes import slipstream_up  # noqa: PLC0415

    common = ["whole", "streamed", "batched", "logprobs", "structured"]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        own = with_tools.model_with_tools(model_folder(DEFAULT_MODEL, Progress()), Path(folder))
        models: dict[str, Any] = {
            "SmolLM2-135M-Instruct": ((), [*common, "no_tools"]),
            with_tools.NAME: (("--model", str(own), "--served-model-name", with_tools.NAME), [*common, "tools"]),
        }
        for name, (flags, cases) in models.items():
            with slipstream_up(Path(folder), *flags) as up:
                host, port = up.until_ready(within_s=300).address
                command = [python, __file__, f"http://{host}:{port}", name, *cases]
                failed += subprocess.run(command, check=False, timeout=900).returncode
                failed += "Traceback" in up.stderr
    return int(failed > 0)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(serve_and_run(sys.argv[1]))
    sys.exit(not asyncio.run(run(sys.argv[1], sys.argv[2], sys.argv[3:])))
