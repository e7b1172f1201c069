"""A model folder is not trusted code: its chat template runs in a sandbox, and finds nothing there."""

import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

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


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set ns = namespace(l=range(99999)|list) %}{% endfor %}",
    "{% macro m(n) %}{% for a in range(99999) %}{{ m(n + 1) }}{% endfor %}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% if messages[0].content ** 2 %}{% endif %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_never_ends_is_refused(template: str) -> None:
    before = sys.gettrace()
    with pytest.raises(InvalidParameter, match=r"chat template .*(does not end|power|recursion)") as refused:
        rendered(template)
    assert refused.value.param == "messages"
    assert sys.gettrace() is before, "nothing else is looked at line by line"


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ 1 / 0 }}"])
def test_who_looked_at_every_line_before_does_so_afterwards(template: str) -> None:
    def look(_frame: FrameType, _event: str, _arg: object) -> None:
        """Be what a debugger or a measurement of coverage has set."""

    before = sys.gettrace()
    sys.settrace(look)
    try:
        with suppress(InvalidParameter):
            rendered(template)
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is look


def test_a_long_chat_is_not_taken_for_an_endless_one() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content|trim }}{% endif %}{{ loop.index }}{% endfor %}"
    )
    files = msgspec.structs.replace(fake_tokenizer_files(), chat_template=template)
    text = ModelTokenizer(files).render(Chat(MESSAGES * 20_000))
    assert text.startswith("hi1hi2hi3")


FAILING = [
    "{{ 1 / 0 }}",
    "{{ range(10000000) }}",
    "{{ messages[0].role.index('q') }}",
    "{{ 'x' * 9999999999999999 }}",
]


@pytest.mark.parametrize("template", FAILING)
def test_whatever_a_template_fails_with_is_its_word_on_this_chat(template: str) -> None:
    with pytest.raises(InvalidParameter, match=r"the chat template refuses these messages: .+"):
        rendered(template)
