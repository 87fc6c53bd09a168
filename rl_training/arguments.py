"""The small key=value parser of the commands that are no Hydra apps, and how every command leaves."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rl_training.errors import UserError, did_you_mean


def parse_key_values(
    arguments: Sequence[str], converters: Mapping[str, Callable[[str], Any]], usage: str
) -> dict[str, list[Any]]:
    """Parse key=value arguments; a key may repeat.

    Each argument is split at its first "=", so that paths may hold any character.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit(0)
    parsed: dict[str, list[Any]] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator or key not in converters:
            suggestion = did_you_mean(key, list(converters))
            raise UserError(f"Unknown argument {argument!r}.{suggestion} Arguments: {', '.join(converters)}.")
        try:
            parsed.setdefault(key, []).append(converters[key](value))
        except ValueError as error:
            raise UserError(f"{key}={value} is not valid: {error}.") from None
    return parsed


def fail(message: str) -> NoReturn:
    """Leave with a one-line error."""
    leave(f"error: {message}", 1)


def leave(message: str, exit_code: int) -> NoReturn:
    """Say one last line, over an unfinished progress line if there is one, and exit."""
    print(f"\r\x1b[K{message}" if sys.stderr.isatty() else message, file=sys.stderr)
    sys.exit(exit_code)


def whole_number(text: str) -> int:
    """Convert an argument such as 20 or 1e5."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("it must be a whole number") from None
    if not value.is_integer():
        raise ValueError("it must be a whole number")
    return int(value)


def working_directory_importable() -> None:
    """Let console scripts import modules of the working directory, as `python -m` does: env.import_module needs it."""
    if "" not in sys.path:
        sys.path.insert(0, "")
