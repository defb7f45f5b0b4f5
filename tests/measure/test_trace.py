"""The cast is found in eager and CUDA-graph traces, and its share is what the events say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlapatch
from mlapatch.commands.trace import trace
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure.kernels import Group
from mlapatch.measure.spool import Spool
from mlapatch.outcome import Table, Text
from tests.measure.synthetic import ACTIVE, CAST, Scene


def run(path: Path, scene: Scene, tokens: int | None = None) -> dict[str, Any]:
    data: Any = trace(files=[scene.write(path / "1.5-TP-0.trace.json.gz")], tokens=tokens).data
    return dict(data["ranks"][0])


SCENES = {
    "graphs": Scene(),
    "graphs, GPU activity only": Scene(cpu=False),
    "graphs, after a prefill": Scene(prefill=True),
    "graphs, with spans": Scene(spans=True),
    "eager": Scene(graphs=False),
    "eager, GPU activity only": Scene(graphs=False, cpu=False),
    "eager, with shapes": Scene(graphs=False, shapes=True),
    "eager, after a prefill": Scene(graphs=False, prefill=True),
    "eager, with spans": Scene(graphs=False, spans=True, prefill=True),
    "61 layers": Scene(layers=61, steps=5, tokens=131_072, cast_us=225.79),
    "61 layers, eager": Scene(layers=61, steps=5, tokens=131_072, cast_us=225.79, graphs=False),
    "2 layers": Scene(layers=2, steps=3),
    "2 steps, eager": Scene(steps=2, graphs=False),
}


@pytest.mark.parametrize("name", SCENES)
def test_the_cast_is_named_and_its_share_is_right(name: str, tmp_path: Path) -> None:
    scene = SCENES[name]
    rank = run(tmp_path, scene)
    cast = rank["cast"]
    assert cast is not None
    assert (cast["layers"], rank["steps"]) == (scene.layers, scene.steps)
    assert cast["calls"] == cast["calls_in_steps"] == scene.layers * scene.steps
    share = scene.cast_total / scene.steps / scene.wall
    assert cast["share_of_step"] == pytest.approx(share, abs=0.02)
    assert rank["step_ms"] == pytest.approx(scene.wall / 1e3, rel=0.02)
    assert cast["bytes_per_call"] == pytest.approx(scene.tokens * 576 * 3, rel=1e-4)
    assert rank["cuda_graphs"] is scene.graphs
    assert rank["without_cast_ms"] == pytest.approx((scene.wall - scene.cast_total / scene.steps) / 1e3, rel=0.03)


def test_recorded_shapes_are_shown(tmp_path: Path) -> None:
    cast = run(tmp_path, Scene(graphs=False, shapes=True))["cast"]
    assert cast["shape"] == [495_552, 1, 576]
    assert cast["evidence"] == "recorded FP8 input"


@pytest.mark.parametrize("graphs", [True, False])
def test_after_the_patch_there_is_no_cast(graphs: bool, tmp_path: Path) -> None:
    scene = Scene(cast_us=None, patch_us=2.5, graphs=graphs)
    rank = run(tmp_path, scene)
    assert rank["cast"] is None
    assert rank["steps"] == scene.steps
    assert rank["step_ms"] == pytest.approx(scene.wall / 1e3, rel=0.02)
    assert any(family["name"] == "mlapatch" for family in rank["families"])
    assert any(kernel["name"] == ACTIVE for kernel in rank["kernels"])


def test_a_bf16_pool_has_no_cast_although_the_template_occurs(tmp_path: Path) -> None:
    assert run(tmp_path, Scene(cast_us=None))["cast"] is None


def test_what_overlaps_with_the_cast_is_not_won_back(tmp_path: Path) -> None:
    rank = run(tmp_path, Scene(overlap_us=400.0))
    assert rank["cast"]["ms_per_step"] == pytest.approx(64.58, abs=0.05)
    assert rank["cast"]["exclusive_ms_per_step"] == pytest.approx(78 * 0.428, abs=0.1)


def test_ranks_are_compared(tmp_path: Path) -> None:
    for number, us in enumerate((828.0, 828.0, 900.0)):
        Scene(cast_us=us).write(tmp_path / f"7.1-TP-{number}.trace.json.gz")
    data: Any = trace(files=[tmp_path]).data
    assert [rank["rank"] for rank in data["ranks"]] == ["0", "1", "2"]
    assert data["slowest"] == "2"
    assert data["skew_ms"] == pytest.approx(78 * 0.072, abs=0.1)


def test_traces_of_the_same_rank_are_not_compared(tmp_path: Path) -> None:
    for name, us in (("stock", 828.0), ("patched", None)):
        Scene(layers=4, steps=3, cast_us=us, patch_us=2.4).write(tmp_path / f"{name}.trace.json.gz")
    outcome = trace(files=[tmp_path])
    data: Any = outcome.data
    assert data["one_profile"] is False
    assert [data[key] for key in ("slowest", "fastest", "skew_ms", "skew_share")] == [None] * 4
    assert [rank["file"].rpartition("/")[2] for rank in data["ranks"]] == [
        "patched.trace.json.gz",
        "stock.trace.json.gz",
    ]
    assert data["advice"][0].startswith("patched.trace.json.gz: No whole-pool cast was found")
    assert any(line.startswith("stock.trace.json.gz: Without the cast") for line in data["advice"])
    (table,) = (block for block in outcome.blocks if isinstance(block, Table))
    assert [row[0] for row in table.rows] == ["patched.trace.json.gz", "stock.trace.json.gz"]
    said = " ".join(line for block in outcome.blocks if isinstance(block, Text) for line in block.lines)
    assert "several profiles" in said
    assert "lowest rank" not in said
    with pytest.raises(MlapatchError, match="a run keeps one profile") as caught:
        trace(files=[tmp_path], keep=True, db=tmp_path / "db")
    assert caught.value.exit is Exit.USAGE


def test_files_of_the_same_name_are_told_by_their_folders(tmp_path: Path) -> None:
    paths = [tmp_path / name / "a-TP-0.trace.json.gz" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        Scene(layers=4, steps=3).write(path)
    data: Any = trace(files=paths).data
    assert {line.partition(": ")[0] for line in data["advice"]} == {str(path) for path in paths}


def test_a_merged_trace_holds_several_ranks(tmp_path: Path) -> None:
    import json

    events = [event for n in range(2) for event in Scene(steps=3, pid=f"[TP{n:02d}] {n}").events()]
    (tmp_path / "merged-1.trace.json").write_text(json.dumps({"traceEvents": events}))
    data: Any = trace(files=[tmp_path]).data
    assert [(rank["rank"], rank["steps"]) for rank in data["ranks"]] == [("0", 3), ("1", 3)]


def test_a_pool_of_another_size_is_remarked(tmp_path: Path) -> None:
    assert any("not the 131,072 tokens" in note for note in run(tmp_path, Scene(steps=3), tokens=131_072)["notes"])
    assert run(tmp_path, Scene(steps=3), tokens=495_552)["notes"] == []


def test_the_prefill_stage_is_left_out(tmp_path: Path) -> None:
    Scene(steps=3).write(tmp_path / "7.1-TP-0-EXTEND.trace.json.gz")
    Scene(steps=3).write(tmp_path / "7.1-TP-0-DECODE.trace.json.gz")
    data: Any = trace(files=[tmp_path]).data
    assert len(data["ranks"]) == 1


def test_advice_names_the_launch_bound(tmp_path: Path) -> None:
    data: Any = trace(files=[Scene(graphs=False).write(tmp_path / "x.trace.json")]).data
    assert any("No CUDA graphs" in line for line in data["advice"])


def test_a_trace_without_gpu_activity_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 1}]}')
    with pytest.raises(MlapatchError, match="no GPU activity"):
        trace(files=[tmp_path / "a.json"])


STRIDED = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}> >(int, at::native::gpu_kernel_impl_nocast)"
)


@pytest.mark.parametrize(
    ("name", "copy", "converts"),
    [
        (CAST, True, True),
        (STRIDED, False, False),
        (STRIDED.replace("_nocast", ""), True, False),
        (
            "void at::native::index_elementwise_kernel<128, 4, index_copy_kernel_impl<X> >(int)",
            False,
            False,
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float> >(int)", False, False),
        ("cast_slots_kernel", False, False),
    ],
)
def test_what_a_kernels_name_says_about_copying(name: str, copy: bool, converts: bool) -> None:
    group = Group(name, (557_496, 1, 1), (128, 1, 1))
    assert (group.is_copy, group.converts) == (copy, converts)


def test_elements_come_from_the_grid() -> None:
    grid, block = (557_496, 1, 1), (128, 1, 1)
    assert Group(CAST, grid, block).elements == 495_552 * 576
    assert Group(CAST.replace(", 4, Trivial", ", 8, Trivial"), grid, block).elements == 2 * 495_552 * 576
    assert Group(STRIDED.replace("128, 4", "128, 2"), grid, block).elements == 495_552 * 288
    assert Group(CAST, (), ()).elements == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_spooling_to_disk_changes_nothing(graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(layers=12, steps=5, graphs=graphs)
    in_memory = run(tmp_path, scene)
    monkeypatch.setattr(Spool.__init__, "__defaults__", (100,))
    assert run(tmp_path, scene) == in_memory


PEAK = """
import sys
from pathlib import Path
from mlapatch.commands.trace import trace
assert trace(files=[Path(sys.argv[1])]).data["cast_found"]
# Not ru_maxrss, which a child takes over from the process that started it.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for steps in (10, 60):
        path = Scene(steps=steps, graphs=False).write(tmp_path / f"{steps}.trace.json")
        environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", PEAK, path], env=environment, capture_output=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < 300
    assert peaks[1] - peaks[0] < 40  # MiB; the second file is 50 MB larger
