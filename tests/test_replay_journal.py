"""The journal gives back the replay buffer as it was, costs only what is new, and stays bounded on disk."""

import numpy as np
import pytest
from specs import numbers

from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.runtime import replay_journal
from rl_training.runtime.checkpointing import prune, write_checkpoint
from rl_training.runtime.replay_journal import ReplayJournal
from rl_training.spaces import ObservationSpec


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(replay_journal, "MIN_SEGMENT_ROWS", 4)


def buffer(capacity: int = 10) -> ReplayBuffer:
    return ReplayBuffer(capacity, 1, ObservationSpec(2), numbers(1), seed=7)


def add(replay: ReplayBuffer, count: int) -> None:
    """Add transitions whose numbers are in every field."""
    for number in range(replay.added, replay.added + count):
        values = np.full((1, 2), number, np.float32)
        replay.add(values, values[:, :1], values[:, 0], values + 0.5, np.array([number % 2 == 0]))


def rewards(replay: ReplayBuffer) -> list[float]:
    return sorted(replay.packed(max(0, replay.added - replay.capacity), replay.added)["rewards"].tolist())


@pytest.mark.parametrize("counts", [[3], [10], [3, 4, 5], [25], [4, 30, 1], [10, 10, 10, 1]])
def test_the_buffer_comes_back_as_it_was(counts, tmp_path):
    replay, journal = buffer(), None
    journal = ReplayJournal(replay, tmp_path)
    for count in counts:
        add(replay, count)
        state = journal.state_dict()
    restored = buffer()
    ReplayJournal(restored, tmp_path).load_state_dict(state)
    total = sum(counts)
    assert restored.added == total
    assert rewards(restored) == [float(number) for number in range(max(0, total - 10), total)]
    first, second = replay.sample(64)[:5], restored.sample(64)[:5]
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))


def test_what_was_appended_after_the_checkpoint_is_not_seen(tmp_path):
    replay = buffer()
    journal = ReplayJournal(replay, tmp_path)
    add(replay, 6)
    state = journal.state_dict()
    add(replay, 20)
    journal.state_dict()
    # The later append made new segments but also wrote over nothing of the old ones.
    restored = buffer()
    again = ReplayJournal(restored, tmp_path)
    again.load_state_dict(state)
    assert rewards(restored) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    add(restored, 1)
    later = again.state_dict()
    third = buffer()
    ReplayJournal(third, tmp_path).load_state_dict(later)
    assert rewards(third) == [float(number) for number in range(7)]


def test_a_checkpoint_appends_only_what_is_new(tmp_path):
    replay = buffer(capacity=1000)
    journal = ReplayJournal(replay, tmp_path)
    add(replay, 50)
    journal.state_dict()
    before = {path.name: path.stat().st_size for path in (tmp_path / "replay").iterdir()}
    add(replay, 2)
    journal.state_dict()
    grown = sum(path.stat().st_size for path in (tmp_path / "replay").iterdir()) - sum(before.values())
    assert grown == 2 * replay.row_dtype.itemsize


def test_disk_use_is_bounded_by_the_kept_checkpoints(tmp_path):
    replay = buffer(capacity=10)
    journal = ReplayJournal(replay, tmp_path)
    for step in range(1, 60):
        add(replay, 3)
        state = {"data": journal.state_dict()}
        write_checkpoint(tmp_path, step, state, ["best"] if step == 20 else [], journal.files())
        prune(tmp_path, keep_last=2)
        rows = sum(path.stat().st_size for path in (tmp_path / "replay").iterdir()) // replay.row_dtype.itemsize
        # The newest two overlap; the best one may need a buffer of its own. A segment has 4 rows here.
        assert rows <= 2 * (10 + 2 * 4) + 3
    best = buffer(capacity=10)
    from rl_training.runtime.checkpointing import find_checkpoint, read_checkpoint

    state = read_checkpoint(find_checkpoint(tmp_path, "best", to_train=True))
    ReplayJournal(best, tmp_path).load_state_dict(state["data"])
    assert rewards(best) == [float(number) for number in range(50, 60)]
