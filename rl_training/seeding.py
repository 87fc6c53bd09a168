"""One seed, many independent streams: every source of randomness in a run derives from (seed, purpose, index)."""

import zlib


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Return a 32-bit seed for one purpose ("env", "policy noise", ...) that is independent of all the others."""
    import numpy as np

    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(zlib.crc32(purpose.encode()), index))
    return int(sequence.generate_state(1)[0])
