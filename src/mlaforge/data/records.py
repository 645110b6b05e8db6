"""Files of records: .jsonl and .parquet, of which each record holds a text or a conversation."""

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
    """The lines of a .jsonl file, blank ones left out: their numbers from 1, and what `read` makes of their values.

    None for a line that is no JSON, or of whose value `read` makes nothing (it may raise what wrong types, keys and
    values raise). `lines` are to be split at "\\n" alone: a JSON string may hold the other characters that end a line.
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
    """The text of a record, for `json_lines`."""
    text: str = record[TEXT]
    text.encode()  # fails for what is no text, or holds half a character
    return text


def parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .parquet file, their columns `text` and `messages`. Raises UserError where it has neither, cannot
    be read, or pyarrow is missing."""
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
                    f"{path} has no column 'text' (but {', '.join(names)}); rename the one that holds the text"
                )
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {' '.join(str(error).split())[:200]}") from error


def text_of(record: Any, tokenizer: Any) -> str:
    """The text of a record: its `text`, or its `messages` through the tokenizer's chat template.

    Raises ValueError, LookupError, TypeError or AttributeError for what is neither, and UserError where the
    conversation needs a chat template that the tokenizer has not, or that refuses it.
    """
    if record.get(TEXT) is not None:
        return text_field(record)
    messages = record[MESSAGES]
    if not (isinstance(messages, list) and messages):
        raise ValueError(messages)
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError("a record holds 'messages', and the tokenizer has no chat template; give records with a 'text'")
    from jinja2 import TemplateError

    # Parquet fills up fields that a message has not.
    turns = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        rendered: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the chat template refuses a record's 'messages': {reason}") from error
    return rendered
