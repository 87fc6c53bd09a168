"""Keys that do not exist, and the one that was meant, in full: algo.learning_rate, as it has to be typed."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

# How alike two names must be for one to be a misspelling of the other, and what standing in the same section adds.
_ALIKE, _SAME_SECTION = 0.6, 0.1


def unknown_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield each key that the schema of a config does not have: `+key=value` slips past it."""
    known = _settings(config)
    for name in config if known else ():
        if name in known:
            yield from unknown_keys(config._get_node(name), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def describe_unknown_key(key: str, config: Any, typed: str | None = None) -> str:
    """Say that a config has no such key, and which one was meant.

    `typed` is the whole key that was asked for, where `key` is the part of it that failed: alg of alg.gamma.
    """
    typed = typed or key
    # Hydra's settings stand beside ours in what it composes; they are meant only by those who name them.
    known = [*_keys(config._get_node("hydra"), "hydra.")] if key.startswith("hydra.") else [*_keys(config, "")]
    meant = _most_alike(typed, known)
    if meant:
        return f"Unknown key {typed}. Did you mean {' or '.join(repr(other) for other in meant)}?"
    section = key.rpartition(".")[0]
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    return f"Unknown key {typed}. Choose from {', '.join(siblings)}."


def _keys(config: Any, prefix: str) -> Iterator[str]:
    """Yield the keys of all settings, and of the sections that they stand in."""
    for name in _settings(config):
        yield f"{prefix}{name}"
        yield from _keys(config._get_node(name), f"{prefix}{name}.")


def _settings(node: Any) -> list[str]:
    """Return the names that a section has by its schema; a single value or a free mapping has none."""
    section_class: Any = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    if not dataclasses.is_dataclass(section_class):
        return []
    return [field.name for field in dataclasses.fields(section_class) if field.name in node.keys()]  # noqa: SIM118


def _most_alike(key: str, known: list[str]) -> list[str]:
    """Return the keys whose own names are most like that of `key`, if any is; a name may stand in several sections."""
    section, _, name = key.rpartition(".")
    likeness = {}
    for other in known:
        other_section, _, other_name = other.rpartition(".")
        ratio = difflib.SequenceMatcher(None, other_name, name).ratio()
        if ratio >= _ALIKE:
            likeness[other] = ratio + _SAME_SECTION * (other_section == section)
    return [other for other, value in likeness.items() if value == max(likeness.values())]
