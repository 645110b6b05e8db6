"""Results of long measurements: rows that grow and are resumed, and the short tables of them that are committed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mlaforge.bench import machine
from mlaforge.runtime import UserError, environment, log

# Significant digits of the numbers of a table.
DIGITS = 8


class Results:
    """File of rows, written atomically after every row, so that an interrupted run loses no row.

    body: content of the file: `facts`, `rows` and `environment`. resume: start from an existing file with the same
    facts, so that its rows are not measured again.
    """

    def __init__(self, path: Path, rows: Any, resume: bool = False, **facts: Any):
        self.path = path
        self.body: dict[str, Any] = {**facts, "rows": rows, "environment": environment()}
        if resume and path.exists():
            existing = json.loads(path.read_text(encoding="utf-8"))
            if facts.items() <= existing.items():
                self.body = existing

    @property
    def rows(self) -> Any:
        """A list of rows, or rows by name."""
        return self.body["rows"]

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the fact `name`, measured if the file lacks it."""
        if name not in self.body:
            self.body[name] = measure()
            self.save()
        return self.body[name]

    def missing(self, keys: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Keys whose items no row contains."""
        return (key for key in keys if not any(key.items() <= row.items() for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        log(json.dumps(row))
        self.save()

    def save(self) -> None:
        machine.write(self.path, self.body)


def add_table(path: Path, name: str, table: dict[str, Any]) -> None:
    """Write a table, facts and `rows`, under `name` into a file of tables, in place of the one that it has. Numbers are
    rounded to DIGITS digits. Raise UserError if the file is not one of tables."""
    try:
        tables = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not all(isinstance(existing["rows"], list) for existing in tables.values()):
            raise TypeError
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{path} is not a file of tables; name another, or a new one") from error
    machine.write(path, {**tables, name: rounded(table)})


def read_table(path: Path, name: str) -> dict[str, Any]:
    """Return the table `name` of a file of tables."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))[name]
    return table


def rounded(value: Any) -> Any:
    """Round all floats within lists and mappings to DIGITS significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [*map(rounded, value)] if isinstance(value, list | tuple) else value
