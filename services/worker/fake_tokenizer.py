"""The fake executor's tokenizer: one token per byte, made in memory."""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from shared.protocol.messages import TokenizerFiles

BYTES = 256
EOS_ID = BYTES
_EOS, _BOS = "<|end|>", "<|begin|>"
VOCABULARY = BYTES + 2

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: itself if it can be seen, else from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unseen = [byte for byte in range(BYTES) if byte not in visible]
    return [chr(byte) if byte in visible else chr(BYTES + unseen.index(byte)) for byte in range(BYTES)]


def fake_tokenizer_files() -> TokenizerFiles:
    """Return a tokenizer whose ids below 256 are the bytes themselves, then the end and the beginning of a text."""
    tokenizer = Tokenizer(BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(_EOS, special=True), AddedToken(_BOS, special=True)])
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=_CHAT_TEMPLATE,
        eos_ids=(EOS_ID,),
        special_tokens={"bos_token": _BOS, "eos_token": _EOS},
    )
