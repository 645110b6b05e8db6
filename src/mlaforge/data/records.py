"""Record files: .jsonl and .parquet with a text or a conversation in each record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mlaforge.runtime import UserError, install

T = TypeVar("T")
# The fields of a record that are read: a text, or the messages of a conversation.
TEXT, MESSAGES = "text", "messages"


def json_lines(lines: Iterable[str], read: Callable[[Any], T]) -> Iterator[tuple[int, T | None]]:
    """Yield the line number (from 1) and the result of `read` for each nonblank line of a .jsonl file.

    The result is None for a line that is not JSON, or for which `read` raises ValueError, LookupError, TypeError or
    AttributeError. Split `lines` at "\\n" only: JSON strings may contain other line separators.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = read(json.loads(line))
        except UserError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError):
            value = None
        yield number, value


def text_field(record: Any) -> str:
    """Return the text of a record, for `json_lines`."""
    text: str = record[TEXT]
    text.encode()  # raises for other types and for lone surrogates
    return text


def parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the columns `text` and `messages` of the rows of a .parquet file. Raises UserError if it has neither,
    cannot be read, or pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(f"reading .parquet needs pyarrow: {install('calibrate')}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not (columns := [name for name in (TEXT, MESSAGES) if name in names]):
                raise UserError(
                    f"{path} has no column 'text' (but {', '.join(names)}); rename the column that holds the text"
                )
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {' '.join(str(error).split())[:200]}") from error


def text_of(record: Any, tokenizer: Any) -> str:
    """Return the text of a record: its `text`, or its `messages` rendered with the tokenizer's chat template.

    Raises ValueError, LookupError, TypeError or AttributeError for other records, and UserError if the tokenizer has no
    chat template or the template refuses the conversation.
    """
    if record.get(TEXT) is not None:
        return text_field(record)
    messages = record[MESSAGES]
    if not (isinstance(messages, list) and messages):
        raise ValueError(messages)
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError("a record holds 'messages', and the tokenizer has no chat template; give records with a 'text'")
    from jinja2 import TemplateError

    # Parquet fills absent fields of a message with null.
    turns = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        rendered: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the chat template refuses a record's 'messages': {reason}") from error
    return rendered
