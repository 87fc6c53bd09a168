"""Plain data to typed config and back, without Hydra: saved run configs, and the YAML presets for Python users."""

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_training.config.algorithms import AlgoConfig
from rl_training.config.keys import describe_unknown_key, unknown_keys
from rl_training.config.schema import TrainConfig
from rl_training.errors import ConfigError, UserError, did_you_mean

# The one place below which a user may add keys of their own.
FREE_KEYS = "env.env_kwargs"


def conf_dir() -> Path:
    """Return the directory of the YAML groups: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def plain(value: Any) -> Any:
    """Return a config value as YAML and JSON can hold it: no dataclass, Enum, Path, tuple or set."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def typed_config(data: dict[str, Any], algo_class: type[AlgoConfig]) -> TrainConfig:
    """Build a `TrainConfig` from plain data; unknown keys and wrong types are refused by name."""
    for section in dataclasses.fields(TrainConfig):
        if dataclasses.is_dataclass(section.type) and not isinstance(data.get(section.name, {}), dict):
            raise ConfigError(f"{section.name} must be a mapping of settings, got {data[section.name]!r}.")
    try:
        base = OmegaConf.structured(TrainConfig(algo=algo_class()))
        return to_train_config(OmegaConf.merge(base, OmegaConf.create(data)))
    except OmegaConfBaseException as error:
        raise ConfigError(describe_omegaconf_error(error)) from None


def to_train_config(composed: DictConfig | ListConfig) -> TrainConfig:
    """Convert a composed config into real dataclasses, which runs every check."""
    for key in unknown_keys(composed):
        raise ConfigError(describe_unknown_key(key, composed))
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(describe_omegaconf_error(error)) from None
    assert isinstance(config, TrainConfig)
    return config


def describe_omegaconf_error(error: OmegaConfBaseException, typed: str | None = None) -> str:
    """Say in one line which key is wrong, and which one was meant; `typed` is the whole of it, if that is known."""
    problem = str(error.msg or error).splitlines()[0].rstrip(".")
    key = error.full_key
    if key and key.startswith(f"{FREE_KEYS}.") and "not in struct" in problem:
        return f"{key} is a key of your own: add it with a plus, +{key}=<value>."
    if key and key.startswith("env.wrappers[") and "not in struct" in problem:
        return f"{key} is not set yet: add it with a plus, +{key.replace('[', '.').replace(']', '')}=<value>."
    if key and "not in '" in problem and error.parent_node is not None:
        return describe_unknown_key(key, error.parent_node._get_root(), typed)
    return f"{key}: {problem}." if key and key not in problem else f"{problem}."


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file as plain data, without running or resolving anything in it."""
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:
        raise UserError(f"Cannot read {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UserError(f"Cannot read {path}: it does not hold a mapping.")
    return {str(key): value for key, value in data.items()}


def shipped_env(name_or_id: str) -> dict[str, Any] | None:
    """Return the settings of the env group with this name or Gymnasium id, or None if we ship none."""
    for path in sorted((conf_dir() / "env").glob("*.yaml")):
        settings = load_yaml(path)
        settings.pop("defaults", None)
        if name_or_id in (settings["name"], settings.get("id")):
            return settings
    return None


def algo_variant(name: str) -> dict[str, Any]:
    """Return what algo=<algo>_<variant> changes in the algorithm's defaults; nothing for the algorithm itself."""
    path = conf_dir() / "algo" / f"{name}.yaml"
    if "_" not in name:
        return {}
    if not path.is_file():
        choices = sorted(choice.stem for choice in path.parent.glob("*.yaml"))
        raise ConfigError(f"Unknown algorithm {name!r}.{did_you_mean(name, choices)} Choose from {', '.join(choices)}.")
    settings = load_yaml(path)
    settings.pop("defaults", None)
    return settings


def tuned_preset(algo_name: str, env_name: str) -> dict[str, Any]:
    """Return the tuned settings of an algorithm and environment, empty if there are none."""
    path = conf_dir() / "tuned" / f"{algo_name}_{env_name}.yaml"
    return load_yaml(path) if path.is_file() else {}
