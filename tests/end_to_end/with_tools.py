"""The default model with a chat template that knows tools, which its own does not."""

import shutil
from pathlib import Path
from typing import Any

NAME = "with-tools"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions with a JSON object in <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <arguments>}
</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TIME: dict[str, Any] = {"name": "get_time", "description": "The time now."}
TOOLS: Any = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]


def model_with_tools(model_folder: Path, folder: Path) -> Path:
    """Return a folder of that model, made of links to the files of the other."""
    model = folder / NAME
    shutil.copytree(model_folder, model, copy_function=lambda source, target: Path(target).symlink_to(source))
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model
