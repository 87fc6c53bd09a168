"""The wrappers that `env.wrappers` names, in a registry: each declares its settings as a dataclass of options.

Environments are restored by replaying an episode (see `snapshots`), so a wrapper may draw random numbers from the
environment's own `np_random` alone, and what it remembers must begin anew in `reset`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium import wrappers as gymnasium_wrappers

from rl_training.config.conversion import plain
from rl_training.config.fields import check_fields, option, required
from rl_training.errors import ConfigError, UserError, did_you_mean

GymEnv = gym.Env[Any, Any]
Step = tuple[Any, float, bool, bool, dict[str, Any]]
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class WrapperSpec:
    """A registered wrapper: its settings, how it is put around an environment, and what evaluation changes."""

    settings_class: type[Any]
    wrap: Callable[[GymEnv, Any], GymEnv]
    evaluation_changes: dict[str, Any] = dataclasses.field(default_factory=dict)


_REGISTRY: dict[str, WrapperSpec] = {}


def register_wrapper(
    name: str,
    settings_class: type[Settings],
    wrap: Callable[[GymEnv, Settings], GymEnv],
    *,
    evaluation_changes: dict[str, Any] | None = None,
) -> None:
    """Make a wrapper known to `env.wrappers`; `wrap(env, settings)` puts it around an environment.

    The settings class is a dataclass whose fields are `config.fields.option` or `required`. Where evaluation should
    differ from training, `evaluation_changes` has the settings that it replaces.
    """
    if not dataclasses.is_dataclass(settings_class) or "name" in {f.name for f in dataclasses.fields(settings_class)}:
        raise TypeError(f"The settings of wrapper {name!r} must be a dataclass without a field called name.")
    _REGISTRY[name] = WrapperSpec(settings_class, wrap, evaluation_changes or {})


def wrapped_env(env: GymEnv, wrappers: Sequence["NamedWrapper"], env_id: str, *, evaluation: bool = False) -> GymEnv:
    """Put wrappers around an environment, the first one innermost."""
    for index, wrapper in enumerate(wrappers):
        changes = wrapper.spec.evaluation_changes if evaluation else {}
        try:
            env = wrapper.spec.wrap(env, dataclasses.replace(wrapper.settings, **changes))
        except (UserError, gym.error.DependencyNotInstalled):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(
                f"env.wrappers[{index}] ({wrapper.name}) cannot be put around {env_id}: {reason}"
            ) from error
    return env


@dataclass(frozen=True)
class NamedWrapper:
    """An entry of `env.wrappers`, checked."""

    name: str
    spec: WrapperSpec
    settings: Any

    def described(self) -> dict[str, Any]:
        """Return name and every setting as plain data, for the run card."""
        return {"name": self.name, **plain(self.settings)}


def named_wrappers(entries: Sequence[Any]) -> list[NamedWrapper]:
    """Check the entries of `env.wrappers`: names, and the type and range of each setting."""
    return [_named_wrapper(entry, f"env.wrappers[{index}]") for index, entry in enumerate(entries)]


def _named_wrapper(entry: Any, key: str) -> NamedWrapper:
    if not isinstance(entry, dict) or "name" not in entry:
        raise ConfigError(
            f"{key} must be a mapping with a name, as in {{name: time_limit, steps: 200}}, got {entry!r}."
        )
    name = entry["name"]
    if not isinstance(name, str) or name not in _REGISTRY:
        advice = did_you_mean(str(name), list(_REGISTRY)) or f" Choose from {', '.join(sorted(_REGISTRY))}."
        raise ConfigError(f"Unknown wrapper {key}.name={name}.{advice}")
    spec = _REGISTRY[name]
    given = {setting: value for setting, value in entry.items() if setting != "name"}
    fields = {field.name: field for field in dataclasses.fields(spec.settings_class)}
    for setting in given:
        if setting not in fields:
            choices = f" Choose from {', '.join(fields)}." if fields else " It has no settings."
            raise ConfigError(f"Unknown key {key}.{setting} of {name}.{did_you_mean(setting, list(fields)) or choices}")
    for setting, field in fields.items():
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if no_default and setting not in given:
            raise ConfigError(f"{key}.{setting} is missing: {name} needs it. {field.metadata['meaning']}")
    settings = spec.settings_class(**given)
    check_fields(settings, key)
    return NamedWrapper(name, spec, settings)


class LearningReward(gym.Wrapper[Any, Any, Any, Any]):
    """Changes rewards for learning alone: logs and evaluations go on to show the return in the rewards below it."""

    def __init__(self, env: GymEnv, change: Callable[[float], float]) -> None:
        super().__init__(env)
        self._change = change
        self.raw_return = 0.0
        """The sum of the episode's rewards as they came from below."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, and begin a new sum."""
        self.raw_return = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        """Step, and change the reward."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.raw_return += float(reward)
        return observation, self._change(float(reward)), terminated, truncated, info


def innermost_learning_reward(env: GymEnv) -> LearningReward | None:
    """Return the wrapper that sees the rewards of the environment itself, if any wrapper changes them for learning."""
    found = None
    while isinstance(env, gym.Wrapper):
        if isinstance(env, LearningReward):
            found = env
        env = env.env
    return found


@dataclass
class TimeLimitSettings:
    """Cut episodes short; the environment's own limit stays."""

    steps: int = required("Steps after which an episode is truncated.", at_least=1)


register_wrapper("time_limit", TimeLimitSettings, lambda env, s: gymnasium_wrappers.TimeLimit(env, s.steps))


@dataclass
class ActionRepeatSettings:
    """Take each action several times."""

    times: int = required("Steps for which an action is taken; the episode's end stops it.", at_least=1)


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Takes each action several times and sums up the rewards; the end of the episode stops it."""

    def __init__(self, env: GymEnv, times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> Step:
        """Step until the action was taken often enough or the episode ended."""
        total, terminated, truncated = 0.0, False, False
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


register_wrapper("action_repeat", ActionRepeatSettings, lambda env, s: ActionRepeat(env, s.times))


@dataclass
class StickyActionsSettings:
    """Now and then take the previous action again (Machado et al., 2018)."""

    probability: float = option(0.25, "How often the previous action is taken instead.", at_least=0, below=1)


register_wrapper(
    "sticky_actions", StickyActionsSettings, lambda env, s: gymnasium_wrappers.StickyAction(env, s.probability)
)


@dataclass
class RewardScaleSettings:
    """Multiply rewards for learning."""

    factor: float = required("What rewards are multiplied by.")


register_wrapper(
    "reward_scale", RewardScaleSettings, lambda env, s: LearningReward(env, lambda reward: s.factor * reward)
)


@dataclass
class RewardClipSettings:
    """Limit rewards for learning."""

    low: float = option(-1.0, "The least reward.")
    high: float = option(1.0, "The largest reward.")


def _reward_clip(env: GymEnv, settings: RewardClipSettings) -> GymEnv:
    low, high = _increasing(settings.low, settings.high)
    return LearningReward(env, lambda reward: min(max(reward, low), high))


def _increasing(low: float, high: float) -> tuple[float, float]:
    if low >= high:
        raise ValueError(f"low={low} must be below high={high}")
    return low, high


register_wrapper("reward_clip", RewardClipSettings, _reward_clip)


@dataclass
class RewardSignSettings:
    """Learn from the sign of rewards: -1, 0 or 1 (Mnih et al., 2015)."""


register_wrapper(
    "reward_sign",
    RewardSignSettings,
    lambda env, s: LearningReward(env, lambda reward: float((reward > 0) - (reward < 0))),
)


@dataclass
class RescaleActionSettings:
    """Let actions run from `low` to `high`, whatever the environment's own limits are."""

    low: float = option(-1.0, "The action that stands for the environment's least.")
    high: float = option(1.0, "The action that stands for the environment's largest.")


def _rescale_action(env: GymEnv, settings: RescaleActionSettings) -> GymEnv:
    if not isinstance(env.action_space, spaces.Box):
        raise TypeError(f"it is for real actions, not {env.action_space}")
    low, high = _increasing(settings.low, settings.high)
    return gymnasium_wrappers.RescaleAction(env, np.float32(low), np.float32(high))


register_wrapper("rescale_action", RescaleActionSettings, _rescale_action)


@dataclass
class ObservationFilterSettings:
    """Hide a part of what the agent sees."""

    keep: list[int | str] | None = option(None, "What stays: numbers of a vector's elements, or keys of a Dict.")
    drop: list[int | str] | None = option(None, "What goes; give either this or keep.")


class ObservationFilter(gym.ObservationWrapper[Any, Any, Any]):
    """Keeps some elements of a vector or some keys of a Dict, in the order that the environment has them."""

    def __init__(self, env: GymEnv, settings: ObservationFilterSettings) -> None:
        super().__init__(env)
        space = env.observation_space
        names = settings.drop if settings.keep is None else settings.keep
        if names is None or (settings.keep is not None and settings.drop is not None):
            raise ValueError("give either keep or drop")
        parts: list[Any]
        if isinstance(space, spaces.Dict):
            parts = list(space.spaces)
        elif isinstance(space, spaces.Box) and len(space.shape) == 1:
            parts = list(range(space.shape[0]))
        else:
            raise TypeError(f"it is for a vector or a Dict, not {space}")
        for name in names:
            if name not in parts:
                choices = f" Choose from {', '.join(map(str, parts))}."
                raise ValueError(f"there is no {name!r}.{did_you_mean(str(name), list(map(str, parts))) or choices}")
        self._kept = [part for part in parts if (part in names) == (settings.keep is not None)]
        if not self._kept:
            raise ValueError("nothing would be left to see")
        if isinstance(space, spaces.Dict):
            self.observation_space = spaces.Dict({part: space.spaces[part] for part in self._kept})
        elif isinstance(space, spaces.Box):
            self.observation_space = spaces.Box(space.low[self._kept], space.high[self._kept], dtype=space.dtype.type)

    def observation(self, observation: Any) -> Any:
        """Return the part that stays."""
        if isinstance(observation, dict):
            return {part: observation[part] for part in self._kept}
        return observation[self._kept]


register_wrapper("observation_filter", ObservationFilterSettings, ObservationFilter)


@dataclass
class AtariSettings:
    """Gymnasium's Atari preprocessing (Machado et al., 2018); the game itself needs frameskip=1."""

    noop_max: int = option(30, "A game begins with up to so many idle frames.", at_least=0)
    frame_skip: int = option(4, "Frames for which an action is taken; the last two are pooled.", at_least=1)
    screen_size: int = option(84, "Height and width of the image.", at_least=1)
    terminal_on_life_loss: bool = option(False, "End an episode, and the game, with each lost life; not in evaluation.")
    grayscale_obs: bool = option(True, "See grey instead of three colours.")


class Atari(gymnasium_wrappers.AtariPreprocessing):
    """Gymnasium's preprocessing, of games that can be replayed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game.

        A game that repeats actions by itself draws from a generator that only a seed can set, so each game gets one;
        that takes a tenth of a second. The wrapper sticky_actions, inside this one, does the same without it.
        """
        if seed is None and self.ale.getFloat("repeat_action_probability") > 0:
            seed = int(self.unwrapped.np_random.integers(2**31))
        return super().reset(seed=seed, options=options)


register_wrapper(
    "atari",
    AtariSettings,
    lambda env, s: Atari(env, **dataclasses.asdict(s)),
    evaluation_changes={"terminal_on_life_loss": False},
)


@dataclass
class FireResetSettings:
    """Press FIRE for the agent where the game waits for it: at its beginning and after a lost life."""


class FireReset(gym.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE at the beginning of a game and after a lost life, so that no policy waits forever."""

    def __init__(self, env: GymEnv) -> None:
        super().__init__(env)
        self._fire = env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]
        self._lives = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game and press FIRE."""
        self.env.reset(seed=seed, options=options)
        observation, _, _, _, info = self.env.step(self._fire)
        self._lives = info["lives"]
        return observation, info

    def step(self, action: Any) -> Step:
        """Step, and press FIRE in the same step if a life was lost and the game goes on."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        total, lost = float(reward), info["lives"] < self._lives
        if lost and not (terminated or truncated):
            observation, reward, terminated, truncated, info = self.env.step(self._fire)
            total += float(reward)
        self._lives = info["lives"]
        return observation, total, terminated, truncated, info


register_wrapper("fire_reset", FireResetSettings, lambda env, s: FireReset(env))
