"""Prompt text from standard input."""

from __future__ import annotations

import sys
import threading

from mlaforge.runtime import UserError, log

# Option value that selects standard input.
STANDARD_INPUT = "-"
# Seconds of waiting for input before a message is logged.
MESSAGE_DELAY = 2.0


def text_or_input(text: str, default: str) -> str:
    """Return the option's text, or standard input if the text is `-`, or if it is the default and input is piped in.

    A final line end of the input, as `echo` writes it, is removed. Raise UserError if the input is not UTF-8, or is
    empty for `-`.
    """
    if text == STANDARD_INPUT:
        if not (piped := _read_piped()):
            raise UserError("--prompt - reads standard input, which is empty; pipe a text into it")
        return piped
    return (_read_piped() or text) if text == default else text


def _read_piped() -> str:
    """All of standard input; "" if it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    message = "reading the prompt from standard input; give it as --prompt if nothing is piped in"
    timer = threading.Timer(MESSAGE_DELAY, log, [message])
    timer.start()
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: byte {error.start}; give the prompt as UTF-8 text") from error
    finally:
        timer.cancel()
