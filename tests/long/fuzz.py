"""Requests made up from the API's own document: no 5xx, no answer that the document does not name, no hang.

The model is a tiny one, drawn at random, whose template knows tools: what is asked for is done, grammars included.

Run by hand, with the command ``schemathesis`` (4.32 or later) of an environment of its own, for as many seconds as
asked for, 300 by default: ``python -m tests.long.fuzz /tmp/fuzz/bin/schemathesis [SECONDS]``.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from services.gateway.bodies import INT32_MAX
from services.worker.fake_tokenizer import VOCABULARY
from tests.end_to_end.served import MODEL, eventually, nothing_is_left, url_of
from tests.integration.processes import Up, slipstream_up
from tests.long.tiny_model import write_tiny_model
from tests.schemas import LARGER, SCHEMAS

KEY = "sk-of-the-fuzzer"
SLOWEST_S = 20
POSITIONS = 2048
"""How long the model's texts may be: answers that are not told to be shorter end there."""
# What fits the schema may be refused for what no schema says: it is too long for the model, or names two prompts.
NOT_CHECKED = "positive_data_acceptance"
# 413 is a refusal like any other: a made-up text may be larger than what is read.
# 504 is what a made-up timeout asks for: one of 5e-324 s comes to pass before any answer is whole.
CONFIGURATION = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]

[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 408, 413, 417, 429, 431, "5xx"]
"""


def document_of(up: Up) -> Any:
    """Return the document with the one model that there is: almost no request would come further otherwise."""
    asked = Request(f"{url_of(up)}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})  # noqa: S310 - http
    with urlopen(asked, timeout=10) as response:  # noqa: S310 - our own http
        document = json.load(response)
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}) and schema.get("additionalProperties") is False:
            is_needed = "model" in schema.get("required", [])
            schema["properties"]["model"] = {"enum": [MODEL] if is_needed else [MODEL, None]}
    _let_ids_be_tokens(document)
    _let_schemas_be_schemas(document["components"]["schemas"])
    _let_messages_have_content(document["components"]["schemas"])
    return document


def _let_messages_have_content(schemas: dict[str, Any]) -> None:
    """Draw, beside any message, those that are complete: which fields one needs depends on its role."""
    any_message = schemas["ChatMessage"]
    usual = {"role": {"enum": ["user", "system", "assistant"]}, "content": {"type": "string"}}
    complete = {"type": "object", "properties": usual, "required": list(usual), "additionalProperties": False}
    schemas["ChatMessage"] = {"anyOf": [complete, any_message]}


def _let_schemas_be_schemas(schemas: dict[str, Any]) -> None:
    """Draw, where any object is taken as the schema of something, also such as can be followed."""
    for name, field in (("JsonSchema", "schema"), ("FunctionDefinition", "parameters")):
        kept = [schema for schema in (*SCHEMAS.values(), *LARGER.values()) if "$ref" not in schema]
        objects = [one for one in kept if one.get("type") == "object"]
        known = {"enum": kept if field == "schema" else objects}
        schemas[name]["properties"][field] = {"anyOf": [known, known, {"type": "object"}]}
    schemas["ChatBody"]["properties"]["chat_template_kwargs"] = {
        "anyOf": [{"type": "object", "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_]{0,30}$"}}, {"type": "null"}]
    }


def _let_ids_be_tokens(part: Any) -> None:
    """Draw ids from the vocabulary that there is, for the same reason."""
    if isinstance(part, dict):
        items = part.get("items", {})
        if items.get("type") == "integer" and items.get("maximum") == INT32_MAX:
            items["maximum"] = VOCABULARY - 1
        for inner in part.values():
            _let_ids_be_tokens(inner)
    elif isinstance(part, list):
        for inner in part:
            _let_ids_be_tokens(inner)


def main(schemathesis: str, seconds: int) -> int:
    """Return schemathesis' exit status, or 1 if the server was hurt."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "tiny"
        write_tiny_model(model, positions=POSITIONS)
        flags = (
            *("--model", str(model), "--served-model-name", MODEL, "--dtype", "float32", "--compile", "off"),
            *("--threads", "1", "--kv-tokens", "65536", "--api-key", KEY, "--open-paths", "/metrics"),
        )
        with slipstream_up(Path(name), *flags) as up:
            up.until_ready()
            path = Path(name) / "openapi.json"
            path.write_text(json.dumps(document_of(up)))
            (Path(name) / "schemathesis.toml").write_text(CONFIGURATION)
            command = [
                schemathesis, "run", str(path), "--url", url_of(up), "-H", f"Authorization: Bearer {KEY}",
                "--max-time", str(seconds), "--exclude-checks", NOT_CHECKED, "--request-timeout", str(SLOWEST_S),
                "--continue-on-failure", "--phases", "coverage,fuzzing", "--no-color",
            ]  # fmt: skip
            status = subprocess.run(command, check=False, cwd=name).returncode
            is_hurt = up.process.poll() is not None or "Traceback" in up.stderr or KEY in up.stderr
            asyncio.run(eventually(nothing_is_left, up))
            if is_hurt:
                print(up.stderr[-5000:])
            return status or int(is_hurt)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300))
