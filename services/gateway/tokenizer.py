"""The tokenizer side of the model: text to tokens, chat to text, tokens to text. No torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from services.gateway.chats import Chat
from services.gateway.stops import StopMatcher
from services.gateway.template_bound import EndlessTemplate, bounded, has_power
from services.gateway.token_texts import TokenTexts
from services.gateway.tool_calls import layout_of
from shared.errors import InvalidParameter
from shared.protocol.messages import Sampling, TokenizerFiles

_OF_TEMPLATES = (
    *(TemplateError, EndlessTemplate, RecursionError, MemoryError),
    *(TypeError, ValueError, ArithmeticError, LookupError),
)
"""What a template that is at odds with a chat, or with itself, ends with."""

_render: Callable[..., Any] = render_jinja_template  # its annotations deny both the pair it returns and its keywords


class ModelTokenizer:
    """What the gateway knows of the model. Frozen: a running answer keeps the one that it began with."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = files.chat_template
        self._special_tokens = dict(files.special_tokens)
        self.texts = TokenTexts(self._tokenizer)
        self.layout = layout_of(files.chat_template or "")
        """How the model writes calls of tools, if it can be read."""
        parsed = _parsed(files.chat_template)
        self._has_tools = parsed is not None and "tools" in meta.find_undeclared_variables(parsed)
        self._has_power = parsed is not None and has_power(parsed)
        added = self._tokenizer.get_added_tokens_decoder()
        marks = () if self.layout is None else (self.layout.opening, self.layout.closing)
        self.marker_ids = {token.content: token_id for token_id, token in added.items() if token.content in marks}
        """The marks around calls that are single tokens of the model."""
        self._special_marks = {one: mark for mark, one in self.marker_ids.items() if added[one].special}
        self.eos_ids = frozenset(files.eos_ids)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.defaults: Sampling = files.defaults
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(vocabulary.values(), default=-1) + 1
        self._longest_token = max(map(len, vocabulary), default=1)
        # what a byte-level tokenizer without a normalizer is given it keeps, so that long texts have many tokens
        self._keeps_all = isinstance(self._tokenizer.decoder, ByteLevel) and self._tokenizer.normalizer is None

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens below which this text cannot come out, without tokenising it; 0 if unknown."""
        return -(-len(text) // self._longest_token) if self._keeps_all else 0

    def encode(self, text: str, *, is_chat: bool) -> tuple[int, ...]:
        """Return the tokens of a text. Plain text gets its BOS, if any; a chat has it from its template.

        As a batch of one: the library holds the interpreter's lock while it encodes a single text (a megabyte stalled
        every stream for 4.8 s), and releases it for a batch (0.03 s).
        """
        return tuple(self._tokenizer.encode_batch([text], add_special_tokens=not is_chat)[0].ids)

    def render(self, chat: Chat) -> str:
        """Return the chat as the model's own template writes it.

        Raises InvalidParameter if the template refuses it, or does not end.
        """
        if self._template is None:
            raise InvalidParameter("this model has no chat template: use /v1/completions", param="messages")
        if chat.tools and not self._has_tools:
            raise InvalidParameter("tools: this model's chat template has no tools", param="tools")
        if self._has_power:
            raise InvalidParameter("the chat template raises to a power, which may never end", param="messages")
        told = {**chat.kwargs, **self._special_tokens, "add_generation_prompt": True}
        try:
            with bounded():
                rendered, _ = _render([list(chat.messages)], tools=chat.tools, chat_template=self._template, **told)
        except _OF_TEMPLATES as error:
            why = str(error) or type(error).__name__  # a MemoryError says nothing
            raise InvalidParameter(f"the chat template refuses these messages: {why}", param="messages") from error
        return str(rendered[0])

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of tokens, without special ones unless they are asked for."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_special)

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary writes them; "" for an id that it has no word for."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, *, keeps_marks: bool = False, with_special: bool = False) -> "Detokenizer":
        """Return a detokenizer for one text; if told so it keeps special tokens that are marks around calls, or all."""
        return Detokenizer(self._tokenizer, self._special_marks if keeps_marks else {}, with_special=with_special)


def _parsed(template: str | None) -> nodes.Template | None:
    """Return a template as it reads, which runs nothing of it; None if it cannot be read: it will refuse every chat."""
    if template is None:
        return None
    try:
        parsed: nodes.Template = _compile_jinja_template("").environment.parse(template)
    except (TemplateSyntaxError, RecursionError):
        return None
    return parsed


class Detokenizer:
    """Tokens to text, one by one. No piece ends within a character; the pieces together are the whole text decoded."""

    def __init__(self, tokenizer: Tokenizer, kept: Mapping[int, str], *, with_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        """Special tokens that are shown all the same."""
        self._skips_special = not with_special
        self._stream = DecodeStream(skip_special_tokens=self._skips_special)
        self._shown: list[int] = []
        """The tokens behind the last piece: how the next ones are decoded may depend on them."""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often none."""
        if token_id in self._kept:
            return self._keep(self._kept[token_id])
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - the binding raises bare Exception for its InvalidPrefix
            return self._restart()
        if piece is None:
            return ""
        self._shown, self._pending = self._pending, []
        return piece

    def end(self) -> str:
        """Return what is left: a character that was cut off reads as U+FFFD, as when all is decoded at once."""
        tail = self._text_of_pending()
        self._shown, self._pending = self._pending, []
        return tail

    def _keep(self, mark: str) -> str:
        """Return what is left and a special token behind it. The text goes on as after any other of them."""
        tail = self.end()
        self._stream, self._shown = DecodeStream(skip_special_tokens=self._skips_special), []
        return tail + mark

    def _restart(self) -> str:
        """Begin a new stream: with byte fallback a bad byte changes how the bytes before it read, which were shown."""
        self._stream = DecodeStream(skip_special_tokens=self._skips_special)
        return self.end()

    def _text_of_pending(self) -> str:
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._pending)
        if text.startswith(before):
            return text[len(before) :]
        return self._decode(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)


class AnswerText:
    """The text of one answer as it grows: whole characters, never a character of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int = 0) -> None:
        self.characters = 0
        """Of the text so far, whether they may be shown or not."""
        self.shown = 0
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher.stopped

    def push(self, token_id: int) -> str:
        """Return the text that may be shown after this token."""
        self._tokens += 1
        return self._show(self._match(self._detokenizer.push(token_id)))

    def end(self) -> str:
        """Return the rest of the text."""
        return self._show(self._match(self._detokenizer.end()) + self._matcher.end())

    def _match(self, text: str) -> str:
        self.characters += len(text)
        return self._matcher.push(text, may_stop=self._tokens > self._min_tokens)

    def _show(self, text: str) -> str:
        self.shown += len(text)
        return text
