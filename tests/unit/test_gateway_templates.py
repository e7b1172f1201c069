"""A model folder is not trusted code: its chat template runs in a sandbox, and finds nothing there."""

from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from jinja2 import Environment

from services.gateway.chats import Chat
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import fake_tokenizer_files
from shared.errors import InvalidParameter

MESSAGES = [{"role": "user", "content": "hi"}]
WAYS_OUT = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__()[0] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__['__builtins__'] }}",
    "{{ self._TemplateReference__context.environment.loader }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__init__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '%s'|format(lipsum.__globals__) }}",
    "{{ messages.append(1) }}",
    "{% set _ = messages[0].update({'content': 'other'}) %}",
]


def rendered(template: str) -> str:
    files = msgspec.structs.replace(fake_tokenizer_files(), chat_template=template)
    return ModelTokenizer(files).render(Chat(MESSAGES))


def is_harmless(text: str) -> bool:
    return "class" not in text and "module" not in text and "builtin" not in text and "function" not in text


@pytest.mark.parametrize("template", WAYS_OUT)
def test_no_way_out_of_the_sandbox_leads_to_anything(template: str) -> None:
    with suppress(InvalidParameter):
        assert is_harmless(rendered(template))
    assert MESSAGES == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("template", WAYS_OUT[:2])
def test_without_a_sandbox_they_do(template: str) -> None:
    plain = Environment()  # noqa: S701 - no HTML is made here
    assert not is_harmless(plain.from_string(template).render(messages=MESSAGES))


@pytest.mark.parametrize("tag", ["include", "import", "extends"])
def test_a_template_reads_no_files(tag: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    end = " as x" if tag == "import" else ""
    with pytest.raises((InvalidParameter, TypeError)):
        rendered(f"{{% {tag} '{secret}'{end} %}}")
