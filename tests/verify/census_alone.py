"""The census of one patched file in some scenarios, with no other comparison: one JSON line each.

Run as a program with TRITON_INTERPRET=1 (test_census.py does): `python -m tests.verify.census_alone JOB SCENARIO...`,
where JOB is a file as `harness.worker` reads it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlapatch.verify.harness import worker
from mlapatch.verify.harness.scenarios import SCENARIOS, Scenario


def censuses(job: worker.Job, scenario: Scenario) -> list[tuple[str, str]]:
    """For each step what it was held against, and what differs."""
    stock_side, stock = worker._drive(job, scenario, job.stock, None)
    names = {key: set(vars(value)) for key, value in stock_side.objects().items()}
    _, patched = worker._drive(job, scenario, job.patched, names)
    pairs = enumerate(zip(stock, patched, strict=True))
    return [worker._census(scenario, i, stock_side, want, got, job.seed) for i, (want, got) in pairs]


def main() -> None:
    job = worker.read_job(Path(sys.argv[1]))
    worker.prepare(job)
    for scenario in SCENARIOS:
        if scenario.name in sys.argv[2:]:
            print(json.dumps([scenario.name, censuses(job, scenario)]), flush=True)


if __name__ == "__main__":
    main()
