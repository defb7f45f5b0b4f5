"""The census says which slots were read, from outputs alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not importable")

from mlapatch.verify.harness import batch, census  # noqa: E402 - needs torch
from mlapatch.verify.harness.pool import KVPool  # noqa: E402
from mlapatch.verify.harness.scenarios import SCENARIOS  # noqa: E402
from tests.verify.conftest import BACKEND, patched_text  # noqa: E402
from tests.verify.fused_tunings import ROOT  # noqa: E402

pytestmark = pytest.mark.verify

Alone = Callable[..., dict[str, list[tuple[str, str]]]]
SCENARIO = next(scenario for scenario in SCENARIOS if scenario.name == "decode-eager")
SLOTS = batch.table(SCENARIO, 0)


@pytest.fixture
def alone(ready_python: str, package: Callable[[str], Path], tmp_path: Path) -> Alone:
    """`alone(patch, version, *scenarios)` -> what each step was held against and what differs, by scenario."""

    def run(patch: str, version: str, *scenarios: str) -> dict[str, list[tuple[str, str]]]:
        folder = package(version)
        patched, job = tmp_path / f"{patch}.py", tmp_path / "job.json"
        patched.write_text(patched_text(patch, version, (folder / BACKEND).read_bytes()))
        files = {"stock": str(folder / BACKEND), "patched": str(patched), "package": str(folder)}
        job.write_text(
            json.dumps({**files, "device": "cpu", "only": [], "seed": 0, "exact": True, "flashinfer": "0.6.18"})
        )
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        command = [ready_python, "-m", "tests.verify.census_alone", str(job), *scenarios]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(line) for line in done.stdout.splitlines())

    return run


@pytest.mark.parametrize(
    ("patch", "scenarios"),
    [
        ("wrong-slot", ("decode-eager", "extend-prefix", "verify-eager")),
        ("off-by-one", ("decode-eager", "extend-prefix", "verify-replay")),
        ("stale-indptr", ("decode-replay",)),
        ("k-scale-applied-twice", ("decode-eager",)),
    ],
)
def test_a_fault_shows_in_the_census_alone(alone: Alone, patch: str, scenarios: tuple[str, ...]) -> None:
    found = alone(patch, "0.5.9", *scenarios)
    assert set(found) == set(scenarios)
    for name, steps in found.items():
        said = [detail for _, detail in steps if detail]
        assert said, name
        assert all(detail.startswith("census, output ") and "request " in detail for detail in said)
        assert all("expected" in detail for detail in said)


def test_none_without_a_fault(alone: Alone) -> None:
    found = alone("sound", "0.5.9", "decode-eager", "decode-replay", "extend-prefix", "verify-replay", "draft-eager")
    assert [detail for steps in found.values() for _, detail in steps if detail] == []
    bases = {name: {basis for basis, _ in steps} - {""} for name, steps in found.items()}
    assert bases.pop("draft-eager") == {"stock"}
    assert len(bases) == 4
    assert all(basis == {"page table"} for basis in bases.values())


def plan() -> batch.Plan:
    return batch.make(SCENARIO, 0, SLOTS, 0, "cpu")


def outputs(read: Callable[[int, list[int]], list[int]], rounded: bool = True) -> list[Any]:
    """Attention's outputs where the token of request r reads `read(r, its slots)`, `[tokens, 2 * 512]` a layer."""
    step, found = plan(), []
    for layer in range(SCENARIO.layers):
        rows = []
        for request, row, n in step.seen(0):
            slots = torch.tensor(read(request, SLOTS[row, :n].tolist()))
            rows.append(census.codes(slots, layer)[:, :512].double().mean(dim=0).repeat(2))
        found.append(torch.stack(rows).bfloat16() if rounded else torch.stack(rows))
    return found


def judged(read: Callable[[int, list[int]], list[int]]) -> tuple[str, str]:
    return census.judge(outputs(lambda _, slots: slots), outputs(read), census.by_table(plan(), SLOTS, 1))


def test_right_reads_are_held_against_the_page_table() -> None:
    assert judged(lambda _, slots: slots[::-1]) == ("page table", "")


@pytest.mark.parametrize(
    "fault",
    [
        lambda slots: slots[:-1],
        lambda slots: [*slots, 0],
        lambda slots: [*slots[:-1], slots[0]],
        lambda slots: [*slots[:-1], slots[-1] + 1],
        lambda slots: [*slots, slots[0]],
        lambda slots: [slot + 256 for slot in slots],
    ],
    ids=["one-less", "padding-too", "twice-for-another", "the-next-slot", "one-twice", "high-digit"],
)
def test_one_wrong_slot_is_named(fault: Callable[[list[int]], list[int]]) -> None:
    basis, said = judged(lambda request, slots: fault(slots) if request == 1 else slots)
    assert basis == "page table"
    assert said.startswith("census, output 1 of 2, request 1, token 1: slots with code ")
    assert " times, " in said
    assert " expected (" in said


def test_the_message_counts() -> None:
    slot = int(SLOTS[1, 0])
    code = census.columns(torch.tensor([slot]), 0)[0, 0]
    _, said = judged(lambda r, slots: [*slots[1:], slots[1]] if r == 0 else slots)
    other = min(int(code), int(census.columns(SLOTS[1, 1:2], 0)[0, 0]))
    assert f"slots with code {other} read {0 if other == code else 2} times, 1 expected" in said


def test_stock_is_the_reference_where_it_reads_other_slots() -> None:
    short = outputs(lambda _, slots: slots[:-1])
    table = census.by_table(plan(), SLOTS, 1)
    assert census.judge(short, short, table) == ("stock", "")
    basis, said = census.judge(short, outputs(lambda _, slots: slots), table)
    assert (basis, "request 0" in said) == ("stock", True)


def test_no_two_slots_share_a_code() -> None:
    found = census.columns(torch.arange(32768), 1)
    assert len(torch.unique(found, dim=0)) == 32768
    assert (int(found.min()), int(found.max())) == (0, 511)
    assert not torch.equal(found, census.columns(torch.arange(32768), 0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_unread_slots_keep_their_nan_and_codes_are_exact(dtype: Any) -> None:
    step, pool = plan(), KVPool(SCENARIO.slots, 1, dtype, SCENARIO.layers, "cpu")
    census.fill(pool, step)
    for layer in range(SCENARIO.layers):
        held = pool.get_key_buffer(layer)[:, 0].float()
        coded = torch.cat((torch.zeros(1, dtype=torch.int64), step.live))
        assert torch.equal(held[coded], census.codes(coded, layer).float())
        rest = torch.ones(pool.slots, dtype=torch.bool)
        rest[coded] = False
        assert held[rest].isnan().all()


def test_long_contexts_and_a_pool_of_other_rows_are_left_out() -> None:
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    long = by_name["decode-length-131072"]
    assert not census.due(long, 0, batch.make(long, 0, batch.table(long, 0), 0, "cpu"), "cuda")
    packed = by_name["packed-656"]
    assert not census.due(packed, 0, batch.make(packed, 0, batch.table(packed, 0), 0, "cpu"), "cuda")


def test_a_gpu_takes_it_in_every_step_and_a_cpu_once_a_kind() -> None:
    replays = next(scenario for scenario in SCENARIOS if scenario.name == "decode-replay")
    slots = batch.table(replays, 0)
    plans = [batch.make(replays, i, slots, 0, "cpu") for i in range(len(replays.steps))]
    assert all(census.due(replays, i, one, "cuda") for i, one in enumerate(plans))
    assert [i for i, one in enumerate(plans) if census.due(replays, i, one, "cpu")] == [1, 5, 6]
