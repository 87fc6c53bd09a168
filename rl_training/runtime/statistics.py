"""Honest summaries of a handful of numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class Summary:
    """Mean and deviation of a sample, and the 95 % interval of the mean (Student's t)."""

    mean: float
    std: float
    low: float
    high: float
    count: int


def summarize(values: Sequence[float]) -> Summary:
    """Summarise a sample; one value alone has an infinite interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Summary(mean, 0.0, -math.inf, math.inf, 1)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half_width = _t_quantile(count - 1) * std / math.sqrt(count)
    return Summary(mean, std, mean - half_width, mean + half_width, count)


def _t_quantile(degrees_of_freedom: int) -> float:
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    z = _NORMAL_QUANTILE  # first terms of the Cornish-Fisher expansion: right to 4 digits from 30 on
    return z + (z**3 + z) / (4 * degrees_of_freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)
