"""Shows where the time of an env step goes, in the workloads of benchmark_speed.py, with and without compiled updates.

Run it as `python scripts/benchmark_breakdown.py [out=docs/images/breakdown.png] [workloads=W1,W2,W3,W4,W5] [rounds=1]
[core=0]`. It prints a table, and draws it into `out`, for which the extra `bench` has matplotlib.

Each workload trains by the training command in a process of its own on one core and one thread, with default logging
and evaluation off. The functions of the loop are wrapped with a clock:

environment    TrainingEnvs.step: the environments themselves, stacking what they return, the ends of episodes
acting         the agent's forward pass and noise, and the conversion to the environment's actions
buffer writes  storing a transition in the rollout or replay buffer
sampling       shuffling a rollout into minibatches, or drawing a batch of transitions
advantages     PPO only: values and log-probabilities of the rollout, generalised advantage estimation
update         the gradient steps, and DQN's target network
bookkeeping    the rest: the loop, counters, NaN checks, normalisation, metrics, logs, timed checkpoints

Counting begins at the end of the iteration that ends the warm-up, long after the first update has compiled, and stops
before the final checkpoint. What the clocks cost is measured on an empty function and taken off. With several rounds,
the one with the median total is shown.
"""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_speed import (
    OURS,
    WORKLOADS,
    BenchmarkError,
    Workload,
    agent_class,
    check_names,
    check_update_path,
    checked_core,
    our_overrides,
    run_on_one_core,
    run_training_command,
)

from rl_training.arguments import fail, parse_key_values, whole_number
from rl_training.errors import UserError

# The colours of Okabe and Ito, which people with colour blindness can tell apart; neighbours also differ in lightness.
COLOURS = {
    "environment": "#0072B2",
    "acting": "#56B4E9",
    "buffer writes": "#009E73",
    "sampling": "#F0E442",
    "advantages": "#CC79A7",
    "update": "#D55E00",
    "bookkeeping": "#BBBBBB",
}
DARK = {"environment", "update"}
SMALLEST_LABEL = 3.5

Breakdown = dict[str, float]
"""Microseconds per env step of each part."""


def main() -> None:
    """Measure, print the table and draw the picture."""
    if sys.argv[1:2] == ["--run"]:
        library, workload, directory = sys.argv[2:]
        breakdown = train_with_clocks(WORKLOADS[workload], OURS[library], Path(directory))
        (Path(directory) / "breakdown.json").write_text(json.dumps(breakdown))
        return
    names = {"out": Path, "workloads": str, "rounds": whole_number, "core": whole_number}
    try:
        arguments = parse_key_values(sys.argv[1:], names, __doc__ or "")
        workloads = arguments.get("workloads", [",".join(WORKLOADS)])[-1].split(",")
        check_names("workloads", workloads, WORKLOADS)
        core = checked_core(arguments.get("core", [0])[-1])
        out = arguments.get("out", [None])[-1]
        if out is not None and importlib.util.find_spec("matplotlib") is None:
            raise UserError("out= needs matplotlib: pip install 'rl_training[bench]'.")
        measured = measure_all(workloads, max(1, arguments.get("rounds", [1])[-1]), core)
        if out is not None:
            draw(measured, out)
    except (UserError, BenchmarkError) as error:
        fail(str(error))


def measure_all(workloads: Sequence[str], rounds: int, core: int) -> dict[tuple[str, str], Breakdown]:
    """Return the breakdown of each workload and variant, and print it as a row."""
    print(
        f"| workload | library | us per env step | {' | '.join(COLOURS)} |\n|{'---|' * (3 + len(COLOURS))}", flush=True
    )
    measured = {}
    with tempfile.TemporaryDirectory() as cache:
        for workload in workloads:
            runs: dict[str, list[Breakdown]] = {library: [] for library in OURS}
            for _ in range(rounds):
                for library in OURS:
                    runs[library].append(measure(library, workload, core, Path(cache)))
            for library in OURS:
                chosen = sorted(runs[library], key=lambda breakdown: sum(breakdown.values()))[(rounds - 1) // 2]
                measured[workload, library] = chosen
                print_row(workload, library, chosen)
    return measured


def print_row(workload: str, library: str, breakdown: Breakdown) -> None:
    """Print microseconds and share of each part."""
    total = sum(breakdown.values())
    cells = [f"{value:.1f} ({value / total:.0%})" if value else "-" for value in breakdown.values()]
    print(f"| {workload} | {library} | {total:.1f} | {' | '.join(cells)} |", flush=True)


def measure(library: str, workload: str, core: int, cache: Path) -> Breakdown:
    """Train one workload in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        run_on_one_core([sys.executable, __file__, "--run", library, workload, directory], core, cache)
        return json.loads((Path(directory) / "breakdown.json").read_text())


class Clocks:
    """Adds up the time inside the functions it wraps, and counts their calls."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(COLOURS, 0.0)
        self.calls = dict.fromkeys(COLOURS, 0)

    def reset(self) -> None:
        """Forget what was counted."""
        self.seconds.update(dict.fromkeys(COLOURS, 0.0))
        self.calls.update(dict.fromkeys(COLOURS, 0))

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock."""
        seconds, calls, clock = self.seconds, self.calls, time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            seconds[part] += clock() - start
            calls[part] += 1
            return result

        return timed

    def wrap_iterator(self, part: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return a function whose iterator has a clock: only the time inside it counts, not that of its user."""

        def timed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            step = self.wrap(part, function(*args, **kwargs).__next__)
            while True:
                try:
                    yield step()
                except StopIteration:
                    return

        return timed

    def cost(self) -> tuple[float, float]:
        """Return the seconds that a clock adds to a call, inside what it measures and around it."""
        count, function = 200_000, lambda *_: None
        start = time.perf_counter()
        for _ in range(count):
            function(self, count)
        plain = time.perf_counter() - start
        clocks = Clocks()
        timed = clocks.wrap("update", function)
        start = time.perf_counter()
        for _ in range(count):
            timed(self, count)
        inside = clocks.seconds["update"]
        around = time.perf_counter() - start - inside
        return max(0.0, inside - plain) / count, around / count


def train_with_clocks(workload: Workload, compiled: bool, directory: Path) -> Breakdown:
    """Train by the training command in this process."""
    clocks = Clocks()
    marks: list[tuple[int, float]] = []

    def watch() -> None:
        for part, owner, name in timed_functions(workload.algo):
            wrap = clocks.wrap_iterator if name == "iter_minibatches" else clocks.wrap
            setattr(owner, name, wrap(part, getattr(owner, name)))
        mark_start_and_end(workload.warm_up, marks, clocks)

    run_training_command(our_overrides(workload, compiled, directory / "run"), watch)
    check_update_path(directory / "run", compiled)
    (first_step, start), (last_step, end) = marks
    inside, around = clocks.cost()
    calls = sum(clocks.calls.values())
    seconds = {part: value - clocks.calls[part] * inside for part, value in clocks.seconds.items()}
    seconds["bookkeeping"] = end - start - sum(clocks.seconds.values()) - calls * around
    return {part: value * 1e6 / (last_step - first_step) for part, value in seconds.items()}


def timed_functions(algo: str) -> list[tuple[str, Any, str]]:
    """Return (part, owner, name) of each function of the loop; none of them calls another."""
    from rl_training.data.replay_buffer import ReplayBuffer
    from rl_training.data.rollout_buffer import RolloutBuffer
    from rl_training.envs.training_envs import TrainingEnvs
    from rl_training.runtime import ppo_trainer

    agent = agent_class(algo)
    functions = [
        ("environment", TrainingEnvs, "step"),
        ("acting", agent, "explore"),
        ("acting", agent, "env_actions"),
        ("update", agent, "update"),
    ]
    if algo == "ppo":
        return [
            *functions,
            ("buffer writes", RolloutBuffer, "add"),
            ("sampling", RolloutBuffer, "iter_minibatches"),
            ("advantages", agent, "log_probs"),
            ("advantages", ppo_trainer, "estimate_advantages"),
        ]
    functions += [("buffer writes", ReplayBuffer, "add"), ("sampling", ReplayBuffer, "sample")]
    return [*functions, ("update", agent, "update_target")] if algo == "dqn" else functions


def mark_start_and_end(warm_up: int, marks: list[tuple[int, float]], clocks: Clocks) -> None:
    """Note env steps and time at the end of the warm-up, where the clocks start anew, and at the end of the loop."""
    from rl_training.runtime.session import TrainingSession

    end_iteration, finish = TrainingSession.end_iteration, TrainingSession.finish

    def end_iteration_and_mark(session: TrainingSession) -> None:
        end_iteration(session)
        if not marks and session.global_step >= warm_up:
            TrainingSession.end_iteration = end_iteration  # type: ignore[method-assign]
            clocks.reset()
            marks.append((session.global_step, time.perf_counter()))

    def mark_and_finish(session: TrainingSession) -> Any:
        marks.append((session.global_step, time.perf_counter()))
        return finish(session)

    TrainingSession.end_iteration = end_iteration_and_mark  # type: ignore[method-assign]
    TrainingSession.finish = mark_and_finish  # type: ignore[method-assign]


def draw(measured: Mapping[tuple[str, str], Breakdown], out: Path) -> None:
    """Draw one bar per workload and variant, all of the same length, with its microseconds at the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 12, "font.family": "DejaVu Sans"})
    workloads = list(dict.fromkeys(workload for workload, _ in measured))
    figure, axes = plt.subplots(figsize=(12, 1.9 + 1.15 * len(workloads)), layout="constrained")
    rows, labels = [], []
    for group, workload in enumerate(workloads):
        for number, (library, name) in enumerate(zip(OURS, ("eager", "compiled"), strict=True)):
            row = group * 2.5 + number
            rows.append(row)
            labels.append(name)
            draw_bar(axes, row, measured[workload, library])
        axes.text(-12, group * 2.5 + 0.5, title(workload), ha="right", va="center", fontweight="bold")
    axes.set_yticks(rows, labels)
    axes.set_ylim(max(rows) + 0.75, -0.75)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time of an env step (%); at the end of each bar, microseconds per env step")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Where the time of an env step goes (one core, one thread)", fontsize=16, fontweight="bold")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside lower center", ncols=len(COLOURS), frameon=False, handlelength=1.2)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def draw_bar(axes: Any, row: float, breakdown: Breakdown) -> None:
    """Draw the parts of one bar, with the share in those wide enough to hold it."""
    total, left = sum(breakdown.values()), 0.0
    for part, value in breakdown.items():
        share = 100 * value / total
        axes.barh(row, share, left=left, height=0.86, color=COLOURS[part], edgecolor="white", linewidth=0.8)
        if share >= SMALLEST_LABEL:
            colour = "white" if part in DARK else "black"
            axes.text(left + share / 2, row, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=11)
        left += share
    axes.text(101, row, f"{total:,.0f} µs" if total >= 100 else f"{total:.1f} µs", va="center")


def title(workload: str) -> str:
    """Return what stands beside the bars of a workload."""
    settings = WORKLOADS[workload]
    envs = f", {settings.num_envs} envs" if settings.num_envs > 1 else ""
    return f"{workload}: {settings.algo.upper()}{envs}\n{settings.env_id}"


if __name__ == "__main__":
    main()
