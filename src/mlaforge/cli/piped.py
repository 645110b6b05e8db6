"""Text that is piped into a command."""

from __future__ import annotations

import sys
import threading

from mlaforge.runtime import UserError, log

# What stands for standard input in place of a text.
STANDARD_INPUT = "-"
# Seconds without anything before a user is told what is waited for.
PATIENCE = 2.0


def text_or_input(text: str, default: str) -> str:
    """An option's text; what is piped in where that is `-`, or where it was left at its default and anything is piped.

    A line end behind it is left out: `echo` writes one. Raises UserError for bytes that are no UTF-8, and for `-` where
    nothing is piped.
    """
    if text == STANDARD_INPUT:
        if not (piped := _piped()):
            raise UserError("--prompt - reads standard input, which is empty; pipe a text into it")
        return piped
    return (_piped() or text) if text == default else text


def _piped() -> str:
    """All of standard input; nothing where it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    waiting = "reading the prompt from standard input; give it as --prompt if nothing is piped in"
    timer = threading.Timer(PATIENCE, log, [waiting])
    timer.start()
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: byte {error.start}; give the prompt as UTF-8 text") from error
    finally:
        timer.cancel()
