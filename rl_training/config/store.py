"""Registers the schemas with Hydra, in a group of their own so that `algo=` lists only real choices."""

from hydra.core.config_store import ConfigStore

from rl_training.config.algorithms import AlgoConfig
from rl_training.config.schema import DeviceConfig, EnvConfig, LoggingConfig, TrainConfig


def register_schemas(algorithms: dict[str, type[AlgoConfig]]) -> None:
    """Store the schema of the whole config, of each algorithm, and of the other groups."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig, package="_global_")
    for name, config_class in algorithms.items():
        store.store(group="schema/algo", name=name, node=config_class)
    store.store(group="schema", name="env", node=EnvConfig)
    store.store(group="schema", name="device", node=DeviceConfig)
    store.store(group="schema", name="logging", node=LoggingConfig)
