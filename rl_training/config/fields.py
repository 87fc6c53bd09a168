"""Dataclass fields that carry their meaning and their range, and the one check that enforces both.

Values from Hydra arrive typed. Values from Python do not, so `check_fields` also converts what is harmless ("tanh" to
an Enum, 1e5 to an int) and refuses the rest in the words a user typed.
"""

import dataclasses
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Union, get_args, get_origin

from rl_training.errors import ConfigError, did_you_mean

# The words of an error message for each bound, and the test that a value must pass.
_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "above": ("above", lambda value, bound: value > bound),
    "at_least": ("at least", lambda value, bound: value >= bound),
    "below": ("below", lambda value, bound: value < bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
}


def option(default: Any, meaning: str, *, words: tuple[str, ...] = (), **bounds: float) -> Any:
    """Declare a config field: its default, what it means, and its range (above, at_least, below, at_most).

    `words` are the texts that a field of type `int | str` or `bool | str` takes.
    """
    metadata = {"meaning": meaning, "words": words, "bounds": bounds}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(meaning: str, **bounds: float) -> Any:
    """Declare a field without a default: what it means, and its range."""
    return dataclasses.field(metadata={"meaning": meaning, "bounds": bounds})


def check_fields(config: Any, section: str) -> None:
    """Convert and check every field of a config dataclass in place; `section` prefixes its key in messages."""
    for field in dataclasses.fields(config):
        key = f"{section}.{field.name}" if section else field.name
        value, words = getattr(config, field.name), field.metadata.get("words")
        value = _word_or_other(value, words, field.type, key) if words else _converted(value, field.type, key)
        setattr(config, field.name, value)
        for number in value if isinstance(value, list) else [value]:
            _check_range(number, field.metadata.get("bounds", {}), key)


def _converted(value: Any, declared: Any, key: str) -> Any:
    if declared is Any:
        return value
    if dataclasses.is_dataclass(declared):
        if not isinstance(value, declared):  # type: ignore[arg-type]
            raise ConfigError(f"{key} must be a {declared.__name__}, got {value!r}.")  # type: ignore[union-attr]
        return value
    origin = get_origin(declared)
    if origin in (Union, types.UnionType):
        return _converted_to_any_of(value, get_args(declared), key)
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{key} must be a list, got {value!r}.")
        (item_type,) = get_args(declared)
        return [_converted(item, item_type, key) for item in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{key} must be a mapping, got {value!r}.")
        return dict(value)
    if isinstance(declared, type) and issubclass(declared, Enum):
        return _converted_to_enum(value, declared, key)
    if declared is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if declared is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, declared) or (isinstance(value, bool) and declared is not bool):
        raise ConfigError(f"{key} must be {_TYPE_NAMES[declared]}, got {value!r}.")
    return value


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _converted_to_any_of(value: Any, alternatives: tuple[Any, ...], key: str) -> Any:
    if value is None and types.NoneType in alternatives:
        return None
    alternatives = tuple(alternative for alternative in alternatives if alternative is not types.NoneType)
    for alternative in alternatives:
        try:
            return _converted(value, alternative, key)
        except ConfigError as error:
            last_error = error
    raise last_error


def _word_or_other(value: Any, words: tuple[str, ...], declared: Any, key: str) -> Any:
    if value in words:
        return value
    (other,) = (alternative for alternative in get_args(declared) if alternative is not str)
    try:
        return _converted(value, other, key)
    except ConfigError:
        allowed = ", ".join(words) + (", " if other is bool else " or ") + _TYPE_NAMES[other]
        raise ConfigError(f"{key} must be {allowed}, got {value!r}.{did_you_mean(str(value), words)}") from None


def _converted_to_enum(value: Any, enum: type[Enum], key: str) -> Enum:
    if isinstance(value, enum):
        return value
    names = list(enum.__members__)
    if value in names:
        return enum[value]
    raise ConfigError(f"{key} must be one of {', '.join(names)}, got {value!r}.{did_you_mean(str(value), names)}")


def _check_range(value: Any, bounds: dict[str, float], key: str) -> None:
    if not bounds or not isinstance(value, (int, float)):
        return
    if not all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
        wanted = " and ".join(f"{_BOUNDS[name][0]} {bound:g}" for name, bound in bounds.items())
        raise ConfigError(f"{key} must be {wanted}, got {value}.")
