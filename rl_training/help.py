"""The help of the training command: every setting of the chosen groups with its value, its range and its meaning."""

import dataclasses
import textwrap
from collections.abc import Iterator
from enum import EnumMeta
from types import NoneType
from typing import Any, get_args

from rl_training.config import TrainConfig
from rl_training.config.conversion import conf_dir, plain

_BOUND_SIGNS = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}


def training_help(config: TrainConfig, launcher: str) -> str:
    """Return the help text for a composed config."""
    groups = "\n".join(_wrapped(group, _choices(group)) for group in ("algo", "env", "device", "logging"))
    presets = _wrapped("tuned", f"chosen by algo and env where there is a preset ({_choices('tuned')})")
    settings = "\n".join(_settings(config, ""))
    return f"""Train a reinforcement-learning agent. Any setting can be given as key=value.

Groups (choose one of each: algo=sac env=pendulum)
{groups}
  env=gym takes any Gymnasium environment: env=gym env.id=MyEnv-v0 [env.import_module=my_package]
{presets}

Examples
  {launcher} algo=sac env=pendulum
  {launcher} algo=ppo env=cartpole algo.learning_rate=1e-4 'algo.hidden_sizes=[64,64]' env.num_envs=8
  {launcher} -m algo=ppo,dqn env=cartpole seed=1,2,3      one run for each combination
  {launcher} resume=outputs/sac/pendulum/<run>            continue an interrupted run
  {launcher} resume=outputs/sac/pendulum/<run> total_timesteps=200000

Settings, with their values for algo={config.algo.name} env={config.env.name} (add algo=… env=… to see others)
{settings}

Flags
  -m           sweep over comma-separated values
  --cfg job    print the composed config and leave
  --hydra-help what Hydra itself offers"""


def _wrapped(group: str, text: str) -> str:
    return textwrap.fill(text, 120, initial_indent=f"  {group:<9} ", subsequent_indent=" " * 12)


def _choices(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def _settings(section: Any, prefix: str) -> Iterator[str]:
    """Yield a line for each field; sections come after the plain fields of the same level."""
    fields = dataclasses.fields(section)
    for field in fields:
        value = getattr(section, field.name)
        if "meaning" in field.metadata:
            yield _setting(f"{prefix}{field.name}", value, field)
    for field in fields:
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{prefix}{field.name}.")


def _setting(key: str, value: Any, field: "dataclasses.Field[Any]") -> str:
    shown = "null" if value is None else str(plain(value)).lower() if isinstance(value, bool) else str(plain(value))
    allowed = _values(field) or _range(field)
    # No-break spaces keep the brackets on one line.
    brackets = f"[{allowed}]".replace(" ", "\xa0") if allowed else ""
    lines = textwrap.fill(
        f"{field.metadata['meaning']} {brackets}",
        120,
        initial_indent=f"  {f'{key}={shown}':<38} ",
        subsequent_indent=" " * 41,
    )
    return lines.replace("\xa0", " ")


def _values(field: "dataclasses.Field[Any]") -> str:
    """Return all values of a setting, empty where they cannot be listed; nobody needs to be told true and false."""
    types = get_args(field.type) or (field.type,)
    names = [name for enum in types if isinstance(enum, EnumMeta) for name in enum.__members__]
    if names and NoneType in types:
        names.append("null")
    words = field.metadata.get("words", ())
    if bool in types and words:
        names = [*words, "true", "false"]
    return ", ".join(names)


def _range(field: "dataclasses.Field[Any]") -> str:
    limits = ", ".join(f"{_BOUND_SIGNS[name]} {bound:g}" for name, bound in field.metadata.get("bounds", {}).items())
    return " or ".join(filter(None, [*field.metadata.get("words", ()), limits]))
