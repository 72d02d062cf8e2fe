"""Tests of faults, and what other tests need of them: runs that can be hit, and comparisons."""

from tests.faults.helpers import (
    TWO_RANKS,
    Torchrun,
    assert_same,
    assert_same_state,
    join,
    run_to_end,
    script_with,
    slow,
    wait_for_step,
)

__all__ = [
    "TWO_RANKS",
    "Torchrun",
    "assert_same",
    "assert_same_state",
    "join",
    "run_to_end",
    "script_with",
    "slow",
    "wait_for_step",
]
