"""Hostile input: patch folders, state, records, logs, traces, configs and environments that nobody means well."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.reliability import _patchfuzz, _readings, _records, _strangers, _surroundings
from tests.reliability._place import own_environment, prepare
from tests.reliability.figures import Figure, Setting

KINDS = (
    _strangers.judge_named,
    _patchfuzz.fuzz_patches,
    _records.journals,
    _records.guard_files,
    _records.databases,
    _records.exports,
    _records.verdict_caches,
    _records.wheel_caches,
    _readings.logs,
    _readings.odd_logs,
    _readings.traces,
    _readings.configs,
    _surroundings.environments,
)


def campaign(setting: Setting) -> Iterable[Figure]:
    """Every kind in turn, each with a seed of its own."""
    place = prepare(setting)
    with own_environment(place):
        for kind in KINDS:
            seeded = random.Random(f"{setting.seed} {kind.__name__}")  # noqa: S311
            yield kind(place, seeded, thorough=setting.thorough).figure()
