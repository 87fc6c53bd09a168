"""Trains pairs of algorithm and environment with their presets over several seeds, and writes docs/results.md.

Run it as `python scripts/results.py [pairs=ppo_cartpole,dqn_cartpole] [seeds=3] [peers=sb3] [steps=100_000]`. Without
pairs it only writes the table and the pictures again from what has been measured. Every finished run is one file in
docs/results; a run that is interrupted, by Ctrl-C or a kill, goes on from its last checkpoint when the command is
called again, and what is measured already is not measured twice. `steps` shortens the budget of the presets and marks
the rows with it. `peers=sb3` trains Stable-Baselines3 with the same settings, steps and seeds (extra `bench`).

The figure of a run is the mean return of its final checkpoint over 100 deterministic episodes with fixed seeds that
training never sees. A row gives the mean over the runs, their interquartile mean with a 95 % bootstrap interval
(stratified resampling is not needed: each run is one number), and every single run.
"""

import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.arguments import fail, parse_key_values, whole_number
from rl_training.config import EnvConfig, TrainConfig
from rl_training.config.conversion import conf_dir, plain
from rl_training.errors import UserError, did_you_mean

DOCS = Path(__file__).resolve().parent.parent / "docs"
RUNS = Path("outputs") / "results"
EPISODES, FIRST_SEED = 100, 200_000

# Published returns (rl-baselines3-zoo 22e3ff2 unless named): one trained model each, so they are optimistic.
PUBLISHED = {
    "ppo_cartpole": "500 (100k)",
    "dqn_cartpole": "500 (50k)",
    "ppo_acrobot": "-73.5 (1M)",
    "dqn_acrobot": "-76.6 (100k)",
    "ppo_mountaincar": "-110.4 (1M)",
    "dqn_mountaincar": "-100.8 (120k)",
    "ppo_pendulum": "-172.2 (100k)",
    "sac_pendulum": "-157.0 (20k)",
    "ppo_mountaincar_continuous": "88.3 (20k)",
    "sac_mountaincar_continuous": "94.7 (50k)",
    "ppo_lunarlander": "242.1 (1M, v2)",
    "dqn_lunarlander": "154.4 (100k, v2)",
    "ppo_inverted_pendulum": "1000 (Tianshou, 1M)",
    "sac_inverted_pendulum": "1000 (Tianshou, 1M)",
    "ppo_halfcheetah": "5819 (1M, v3)",
    "sac_halfcheetah": "9535 (1M, v3)",
    "ppo_hopper": "2410 (1M, v3)",
    "sac_hopper": "2326 (1M, v3)",
}


@dataclass(frozen=True)
class Run:
    """One finished run."""

    pair: str
    library: str
    seed: int
    steps: int
    seconds: float
    returns: list[float]
    curve: list[list[float]]
    settings: dict[str, dict[str, Any]]

    @property
    def figure(self) -> float:
        """The mean return of its final checkpoint."""
        return float(np.mean(self.returns))


def main() -> None:
    """Measure what is asked for, then write the table and the pictures."""
    names = {"pairs": str, "seeds": whole_number, "peers": str, "steps": whole_number}
    try:
        arguments = parse_key_values(sys.argv[1:], names, __doc__ or "")
        pairs = [pair for pair in arguments.get("pairs", [""])[-1].split(",") if pair]
        libraries = ["ours", *(peer for peer in arguments.get("peers", [""])[-1].split(",") if peer)]
        for pair in pairs:
            check_pair(pair)
        if unknown := set(libraries) - {"ours", "sb3"}:
            raise UserError(f"Unknown peer {', '.join(sorted(unknown))}: only sb3 is there.")
        steps = arguments.get("steps", [None])[-1]
        todo = [
            (pair, library, seed)
            for seed in range(1, arguments.get("seeds", [3])[-1] + 1)
            for pair in pairs
            for library in libraries
        ]
        for number, (pair, library, seed) in enumerate(todo, start=1):
            measure(pair, library, seed, steps, f"{number}/{len(todo)}")
        write_report([Run(**json.loads(path.read_text())) for path in sorted((DOCS / "results").glob("*.json"))])
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; call it again to go on.")


def check_pair(pair: str) -> None:
    """Refuse a pair that has no preset."""
    presets = [path.stem for path in sorted((conf_dir() / "tuned").glob("*_*.yaml"))]
    if pair not in presets:
        raise UserError(f"There is no preset {pair}.{did_you_mean(pair, presets)} Presets: {', '.join(presets)}.")


def split_pair(pair: str) -> tuple[str, str]:
    """Split the name of a preset; both parts may hold an underscore, so the longest name of an environment counts."""
    envs = sorted((path.stem for path in (conf_dir() / "env").glob("*.yaml")), key=len, reverse=True)
    env = next(env for env in envs if pair.endswith(f"_{env}"))
    return pair.removesuffix(f"_{env}"), env


def measure(pair: str, library: str, seed: int, steps: int | None, number: str) -> None:
    """Train one run and evaluate its end, unless that was done before."""
    config = preset_config(pair, seed, steps)
    path = DOCS / "results" / f"{pair}-{config.total_timesteps}-{library}-{seed}.json"
    settings = {"algo": plain(config.algo), "env": plain(config.env)}
    if path.exists() and same_settings(json.loads(path.read_text())["settings"], settings, config):
        return
    print(f"{number} {pair} ({library}, seed {seed}, {config.total_timesteps:,} steps)", flush=True)
    if library == "sb3":
        from sb3_runs import train_sb3

        start = time.monotonic()
        returns = train_sb3(config, episodes=EPISODES, first_seed=FIRST_SEED)
        seconds, curve = time.monotonic() - start, []
    else:
        seconds, returns, curve = train_ours(config, RUNS / f"{path.stem}-{fingerprint(settings)}")
    run = Run(pair, library, seed, config.total_timesteps, round(seconds, 1), returns, curve, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(run)) + "\n")
    print(f"    return {run.figure:.1f} in {seconds:.0f} s", flush=True)


def same_settings(measured: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]], config: TrainConfig) -> bool:
    """Tell whether a result still holds: an option that came later counts as if it had been at its default."""
    defaults = {"algo": plain(type(config.algo)()), "env": plain(EnvConfig())}
    return all(defaults[section] | measured[section] == now[section] for section in now)


def fingerprint(settings: dict[str, dict[str, Any]]) -> str:
    """Return a short name for settings, so that a changed preset gets a run directory of its own."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def preset_config(pair: str, seed: int, steps: int | None = None) -> TrainConfig:
    """Return the config of a preset, as the command line would compose it."""
    from rl_training.api.algorithms import make_config

    algo, env = split_pair(pair)
    settings: dict[str, Any] = {"seed": seed, "logging": {"progress": False, "tensorboard": False}}
    config = make_config(algo, env, **settings, **({"total_timesteps": steps} if steps else {}))
    assert config.preset == pair
    config.eval.every = max(1, config.total_timesteps // 20)
    return config


def train_ours(config: TrainConfig, run_dir: Path) -> tuple[float, list[float], list[list[float]]]:
    """Train, or go on with, a run; return its training seconds, final returns and learning curve."""
    from rl_training.experiment.default_manager import DefaultExperimentManager
    from rl_training.runtime.checkpointing import CHECKPOINTS_DIR
    from rl_training.runtime.loggers import read_evaluations
    from rl_training.runtime.run_card import read_run_card
    from rl_training.runtime.workflows import evaluate_checkpoint

    manager = DefaultExperimentManager()
    if read_run_card(run_dir).get("status") != "finished":
        if any((run_dir / CHECKPOINTS_DIR).glob("step_*")):
            manager.resume(run_dir).train()
        else:
            remove_unfinished(run_dir)
            manager.setup(config, run_dir=run_dir).train()
    result = evaluate_checkpoint(run_dir, checkpoint="last", episodes=EPISODES, seed=FIRST_SEED)
    curve = [[row["step"], float(np.mean(row["returns"]))] for row in read_evaluations(run_dir)]
    return float(read_run_card(run_dir)["wall_seconds"]), list(result.returns), curve


def remove_unfinished(run_dir: Path) -> None:
    """Remove a run that was killed before its first checkpoint."""
    import shutil

    if run_dir.exists():
        shutil.rmtree(run_dir)


def interquartile_mean(values: np.ndarray[Any, Any]) -> float:
    """Mean of the middle half, in which values at its border count by the share that lies inside.

    With less than four values it is the mean of what weighs in: of three, a quarter of each outer one drops out.
    """
    ordered = np.sort(values)
    count = len(ordered)
    # Value i covers the share [i / n, (i + 1) / n] of the sample; the middle half is [1 / 4, 3 / 4].
    edges = np.arange(count + 1) / count
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0.0, None)
    return float((weights * ordered).sum() / weights.sum())


def bootstrap_interval(values: np.ndarray[Any, Any], resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of the interquartile mean over resampled runs."""
    draws = np.random.default_rng(0).choice(values, size=(resamples, len(values)))
    means = np.apply_along_axis(interquartile_mean, 1, draws)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def write_report(runs: list[Run]) -> None:
    """Write docs/results.md and the pictures it shows."""
    groups: dict[tuple[str, int], dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault((run.pair, run.steps), {}).setdefault(run.library, []).append(run)
    lines = [
        REPORT_HEAD,
        "| pair | steps | library | seeds | mean | IQM [95 %] | each seed | training time | published |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for (pair, steps), by_library in sorted(groups.items()):
        lines += [
            row(pair, steps, library, by_library[library]) for library in ("ours", "sb3") if library in by_library
        ]
    pictures = draw_curves(groups)
    if pictures:
        lines += ["", "## Learning curves", "", PICTURE_TEXT, ""]
        lines += [f"![{picture.stem}]({picture.relative_to(DOCS)})" for picture in pictures]
    (DOCS / "results.md").write_text("\n".join(lines) + "\n")


def row(pair: str, steps: int, library: str, runs: list[Run]) -> str:
    """One line of the table."""
    figures = np.array([run.figure for run in sorted(runs, key=lambda run: run.seed)])
    interval = "" if len(figures) < 3 else " [{:.1f}, {:.1f}]".format(*bootstrap_interval(figures))  # of two: nothing
    cells = [
        " ".join(split_pair(pair)),
        f"{steps:,}",
        "**ours**" if library == "ours" else "SB3",
        str(len(runs)),
        f"{figures.mean():.1f}",
        f"{interquartile_mean(figures):.1f}{interval}",
        ", ".join(f"{figure:.1f}" for figure in figures),
        f"{np.median([run.seconds for run in runs]):.0f} s",
        PUBLISHED.get(pair, "-") if library == "ours" else "",
    ]
    return f"| {' | '.join(cells)} |"


def draw_curves(groups: dict[tuple[str, int], dict[str, list[Run]]]) -> list[Path]:
    """Draw one picture per algorithm: a panel for each pair, with every seed and their mean."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise UserError("The pictures need matplotlib: pip install 'rl_training[bench]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pictures = []
    for algo in ("ppo", "dqn", "sac"):
        panels = [(key, runs) for key, runs in sorted(groups.items()) if key[0].startswith(f"{algo}_")]
        panels = [(key, runs) for key, runs in panels if any(run.curve for run in runs.get("ours", []))]
        if not panels:
            continue
        columns = min(3, len(panels))
        height = -(-len(panels) // columns)
        figure, axes = plt.subplots(height, columns, figsize=(4.2 * columns, 3.0 * height), squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, ((pair, steps), by_library) in zip(axes.flat, panels, strict=False):
            curves = [np.array(run.curve) for run in by_library["ours"]]
            for curve in curves:
                axis.plot(curve[:, 0], curve[:, 1], color="#0072B2", alpha=0.25, linewidth=1)
            shortest = min(map(len, curves))
            mean = np.mean([curve[:shortest] for curve in curves], axis=0)
            axis.plot(mean[:, 0], mean[:, 1], color="#0072B2", linewidth=2, label=f"ours, {len(curves)} seeds")
            if "sb3" in by_library:
                end = [run.figure for run in by_library["sb3"]]
                axis.scatter([steps] * len(end), end, color="#D55E00", marker="x", zorder=3, label="SB3, final")
            axis.set_title(" ".join(split_pair(pair)), fontsize=10)
            axis.set_xlabel("env steps")
            axis.set_ylabel("return")
            axis.grid(alpha=0.2)
            axis.legend(fontsize=7, loc="lower right")
        figure.tight_layout()
        path = DOCS / "images" / f"curves_{algo}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90)
        plt.close(figure)
        pictures.append(path)
    return pictures


REPORT_HEAD = f"""# Results

What `algo=<algo> env=<env>` reaches with the preset that applies by itself. Each figure is the mean return of a final
checkpoint over {EPISODES} deterministic episodes, whose seeds ({FIRST_SEED:,} on) training never sees; nothing is
picked by its result. IQM is the interquartile mean over seeds with its 95 % bootstrap interval. SB3 is
Stable-Baselines3 with the same settings, steps and seeds, measured the same way (its DQN has no double Q). Published
values are those of single trained models, from other versions and budgets where noted: not the same measurement.
Training times are wall-clock times, of a machine that often had other work: docs/performance.md compares speeds.

This file is written by `python scripts/results.py`, which adds what is missing and never measures twice:

```sh
python scripts/results.py pairs=ppo_cartpole,dqn_cartpole seeds=5 peers=sb3
```
"""
PICTURE_TEXT = "Evaluations during training (10 episodes each): every seed, and their mean."

if __name__ == "__main__":
    main()
