"""The columns of the sampling tables. It does not import torch, as the planner computes the tables' size."""

from __future__ import annotations

import enum

MAX_LISTED = 1024  # entries of a row's bias list, and of its stop list


class Real(enum.IntEnum):
    """Columns of `SamplingBatch.real`."""

    TEMPERATURE = 0  # 0 is greedy
    TOP_P = 1  # 1 means off
    LOG_MIN_P = 2  # -inf means off
    REPETITION = 3  # 1 means off
    PRESENCE = 4
    FREQUENCY = 5


class Whole(enum.IntEnum):
    """Columns of `SamplingBatch.whole`."""

    SEED = 0
    TOP_K = 1  # vocabulary size means off
    OUTPUT_START = 2  # positions from here on count as output
    MIN_END = 3  # no token of `stop_ids` is chosen before this position
    NUM_STOPS = 4  # entries of `stop_ids`
    NUM_BIASES = 5  # entries of `bias_ids` and `bias_values`
    IS_FILTERED = 6  # min_p, top_k or top_p is on
    IS_PENALISED = 7
