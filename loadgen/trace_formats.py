"""The rows of published traces, as their files have them. The format is told by the file's first line."""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from loadgen.server import CannotStart

HASH_BLOCK_TOKENS = 512
"""How much of a prompt one of Mooncake's hash ids stands for."""

_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class BadTrace(CannotStart):
    """A trace cannot be read; the text names the file, and the line if one is to blame."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    `at_s` is seconds after the trace's first request, None in a file of lengths. Two requests whose `hash_ids` begin
    alike share that many blocks of prompt; the last block may be partly filled.
    """

    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[int, ...]


_Parser = Callable[[str], TraceRequest]


def read_rows(path: Path) -> Iterator[tuple[int, TraceRequest]]:
    """Yield each row with the number of its line, `at_s` on the file's own clock. Raises `BadTrace`.

    Rows are read as they are asked for, blank lines passed over.
    """
    line = 0
    try:
        with _opened(path) as file:
            parse: _Parser | None = None
            for text in file:
                line += 1
                if not text.strip():
                    continue
                if parse is None:
                    parse, is_header = _parser_for(text)
                    if is_header:
                        continue
                yield line, parse(text)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:  # in what follows: a file is read in pieces
        raise BadTrace(f"{path} cannot be read after line {line}: {error}") from error
    except ValueError as error:  # what a parser says of its row
        raise BadTrace(f"{path}, line {line}: {error}") from error


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _parser_for(text: str) -> tuple[_Parser, bool]:
    """Return what reads the rows of a file that begins so, and whether its first line is a header."""
    if text.lstrip().startswith("{"):
        return _mooncake, False
    columns = [name.strip() for name in text.split(",")]
    if columns[:2] == ["num_prefill_tokens", "num_decode_tokens"]:
        return _lengths, True
    if columns == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        return _azure, True
    raise ValueError(f"neither a trace of Azure or Mooncake nor a file of lengths begins {text.strip()[:60]!r}")


def _lengths(text: str) -> TraceRequest:
    prompt, output, *_ = _cells(text, 2)
    return TraceRequest(None, _tokens(prompt), _tokens(output))


def _azure(text: str) -> TraceRequest:
    stamp, prompt, output = _cells(text, 3)
    moment = datetime.fromisoformat(stamp)  # keeps six digits of the fraction: Azure's seventh is cut
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return TraceRequest(moment.timestamp(), _tokens(prompt), _tokens(output))


def _mooncake(text: str) -> TraceRequest:
    row = msgspec.json.decode(text, type=_MooncakeRow)
    blocks = -(-row.input_length // HASH_BLOCK_TOKENS)
    if len(row.hash_ids) != blocks:
        raise ValueError(f"{len(row.hash_ids)} hash ids where {row.input_length} tokens make {blocks} blocks")
    return TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _cells(text: str, at_least: int) -> list[str]:
    cells = next(csv.reader([text]))
    if len(cells) < at_least:
        raise ValueError(f"{len(cells)} columns where {at_least} are needed")
    return cells


def _tokens(cell: str) -> int:
    if not (cell.isascii() and cell.isdigit()):
        raise ValueError(f"{cell!r} is not a number of tokens")
    return int(cell)
