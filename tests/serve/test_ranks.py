"""Which ranks a node runs, against SGLang's own arithmetic; and which of them said what bytes they run."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlapatch.commands.diagnose import diagnose
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome
from mlapatch.serve.preflight import Context, PatchedFile, PatchFacts, gpus
from mlapatch.serve.ranks import Layout, listed
from mlapatch.serve.server_options import ServerOptions
from mlapatch.serve.transcript import Transcript
from tests.conftest import TreeFactory
from tests.serve.test_launch import SHA, Bench, bench, diagnosis, patched

__all__ = ["bench"]

PATH = "/sp/sglang/srt/layers/attention/flashinfer_mla_backend.py"
SIZES = [(1, 1, 1), (8, 1, 1), (16, 1, 2), (16, 1, 4), (8, 2, 2), (4, 4, 2), (8, 2, 4), (32, 2, 8)]


def layout(line: str) -> Layout:
    return Layout.of(ServerOptions.of(line.split()))


@pytest.mark.parametrize(("tp", "pp", "nodes"), SIZES)
def test_ranks_are_those_that_sglang_starts(wheel_dir: TreeFactory, tp: int, pp: int, nodes: int) -> None:
    """Every node's ranges come from the release's own lines."""
    source = (wheel_dir("0.5.9") / "sglang/srt/entrypoints/engine.py").read_text("utf-8")
    function = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_launch_scheduler_processes"
    )
    wanted = ("pp_size_per_node", "nnodes_per_pp_rank", "pp_rank_range", "nnodes_per_tp_group", "tp_size_per_node")
    lines = [
        ast.unparse(node)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (*wanted, "tp_rank_range")
    ]
    assert len(lines) == 6
    seen: list[str] = []
    for node in range(nodes):
        said: dict[str, Any] = {
            "server_args": SimpleNamespace(tp_size=tp, pp_size=pp, nnodes=nodes, node_rank=node),
            "range": range,
            "max": max,
        }
        exec("\n".join(lines), said)  # noqa: S102 - SGLang's own lines
        theirs = [
            " ".join(part for part in (f"PP{p}" if pp > 1 else "", f"TP{t}" if tp > 1 else "") if part)
            for p in said["pp_rank_range"]
            for t in said["tp_rank_range"]
        ]
        mine = layout(f"--tp {tp} --pp-size {pp} --nnodes {nodes} --node-rank {node}").names
        assert list(mine) == theirs
        seen += mine
    assert len(set(seen)) == len(seen) == tp * pp


def test_dp_ranks() -> None:
    assert layout("--tp 2 --dp 2").names == ("DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1")
    attention = layout("--tp 2 --dp 2 --enable-dp-attention")
    assert attention.names == ("TP0", "TP1")
    assert attention.name_of("DP1 ATTN_CP0 TP1 EP1") == "TP1"
    assert layout("--tp 1").name_of(None) == layout("").names[0] == ""


def test_what_the_server_says_of_itself_outranks_its_command_line() -> None:
    facts = {"tp": "16", "nodes": "2", "node": "1", "pp": "1", "dp": "16", "dp_attention": "True"}
    found = Layout.of(ServerOptions.of(["start.sh"]), facts)
    assert found.names[0] == "TP8"
    assert len(found.names) == 8
    assert found.where == "node 1 of 2 (counted from 0)"


@pytest.mark.parametrize("line", ["--tp x --nnodes y", "--tp 0 --nnodes 0 --node-rank -1", "--tp 1 --nnodes 9"])
def test_senseless_numbers_end_nothing(line: str) -> None:
    assert len(layout(line).names) == 1


def test_listed() -> None:
    assert listed(["TP9", "TP10", "TP8", "TP12"]) == "TP8 to TP10, TP12"
    assert listed(["PP0 TP1", "PP0 TP0", "PP1 TP2"]) == "PP0 TP0, PP0 TP1, PP1 TP2"
    assert listed([""]) == "the only rank"


def test_a_node_needs_gpus_for_its_own_ranks_only() -> None:
    """`--tp 16 --nnodes 2` on a machine with eight GPUs."""
    options = ServerOptions.of(["--tp", "16", "--nnodes", "2", "--node-rank", "1"])
    eight = [SimpleNamespace(pids=(), used=0, name="H200", sm=90, total=1, index=i) for i in range(8)]
    assert [one.state for one in gpus(Context(options, {}, gpus=eight))] == ["ok"]  # type: ignore[arg-type]
    few = gpus(Context(options, {}, gpus=eight[:4]))  # type: ignore[arg-type]
    assert "node 1 of 2 (counted from 0), tensor parallel 16, needs 8 GPUs; 4 are visible" in next(iter(few)).text


# -------------------------------------------------------------------------------------------------------- in launch
@pytest.mark.parametrize("node", [0, 1])
def test_a_start_on_two_nodes(bench: Bench, monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    patched(monkeypatch, SHA)
    nodes = ("--tp", "4", "--nnodes", "2", "--node-rank", str(node))
    outcome = bench.launch(*nodes, "--mark", PATH, SHA)
    assert outcome.exit is Exit.OK, outcome.data
    ranks = outcome.data["ranks"]
    assert isinstance(ranks, dict)
    mine = ["TP0", "TP1"] if node == 0 else ["TP2", "TP3"]
    assert (ranks["node"], ranks["nodes"], ranks["expected"]) == (node, 2, mine)
    assert ranks["files"][0]["sha256"] == {SHA: mine}
    said = "\n".join(bench.said)
    assert f"node {node} of 2 (counted from 0): {mine[0]}, {mine[1]} logged the sha256" in said
    assert "diagnose --ranks LOG" in said
    assert ("Paris" in said) == (node == 0), "only node 0 answers prompts"


def test_a_rank_of_this_node_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, SHA)
    nodes = ("--tp", "6", "--nnodes", "2", "--node-rank", "1", "--unmarked", "4")
    outcome = bench.launch(*nodes, "--mark", PATH, SHA)
    assert outcome.exit is Exit.SERVER
    cause = diagnosis(outcome)["cause"]
    assert cause == "rank TP4 has not logged the sha256 of the patched flashinfer_mla_backend.py (TP3, TP5 did)"
    assert bench.left_behind() == []


# ------------------------------------------------------------------------------------------------ another node's log
def log_of(folder: Path, node: int, shas: dict[int, str], phase: str = "Load weight begin. avail mem=94 GB") -> Path:
    lines = [f"[2026-11-29 10:00:00] server_args=ServerArgs(nnodes=2, node_rank={node}, tp_size=4, pp_size=1)"]
    for rank in (2 * node, 2 * node + 1):
        lines.append(f"[2026-11-29 10:00:01 TP{rank}] {phase}")
        if rank in shas:
            text = f"mlapatch: active-cast active in {PATH} sha256={shas[rank]}"
            lines.append(f"[2026-11-29 10:00:02 TP{rank}] {text}")
    file = folder / f"node{node}.log"
    file.write_text("\n".join(lines) + "\n")
    return file


def ranks_of(log: Path, monkeypatch: pytest.MonkeyPatch, sha: str = SHA) -> Outcome:
    patched(monkeypatch, sha)
    return diagnose(log=str(log), ranks=True)


@pytest.mark.parametrize("node", [0, 1])
def test_another_nodes_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    outcome = ranks_of(log_of(tmp_path, node, dict.fromkeys(range(4), SHA)), monkeypatch)
    assert outcome.exit is Exit.OK
    assert outcome.data["ranks_problem"] == ""
    assert outcome.data["ranks"]["node"] == node  # type: ignore[index]


@pytest.mark.parametrize(
    ("shas", "words"),
    [
        ({2: SHA}, "rank TP3 has not logged"),
        ({}, "no rank has logged"),
        ({2: SHA, 3: "cd" * 32}, "rank TP3 runs"),
        ({2: "cd" * 32, 3: "cd" * 32}, "rank TP2, TP3 runs"),
    ],
)
def test_another_nodes_log_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shas: dict[int, str], words: str
) -> None:
    outcome = ranks_of(log_of(tmp_path, 1, shas), monkeypatch)
    assert outcome.exit is Exit.FOUND
    assert words in str(outcome.data["ranks_problem"])


def test_a_rank_that_said_nothing_at_all_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one line of TP3 is in the log: only the server's arguments say that there should be."""
    log = log_of(tmp_path, 1, {2: SHA})
    log.write_text("\n".join(line for line in log.read_text().splitlines() if "TP3" not in line))
    assert "rank TP3 has not logged" in str(ranks_of(log, monkeypatch).data["ranks_problem"])


def test_nothing_applied_here_is_nothing_to_compare_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: PatchFacts())
    outcome = diagnose(log=str(log_of(tmp_path, 0, {})), ranks=True)
    assert outcome.exit is Exit.FOUND
    assert "no patch is applied" in str(outcome.data["ranks_problem"])


def test_without_the_option_a_log_is_only_explained(tmp_path: Path) -> None:
    outcome = diagnose(log=str(log_of(tmp_path, 1, {2: SHA, 3: "cd" * 32})))
    assert outcome.exit is Exit.OK
    assert "ranks_problem" not in outcome.data
    shown = str(outcome.blocks)
    assert f"flashinfer_mla_backend.py (active-cast): sha256 {SHA[:16]}... in TP2; sha256 cdcdcd" in shown


def test_the_file_is_found_by_its_name_or_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node's environment may lie elsewhere."""
    file = PatchedFile(Path("/elsewhere/renamed.py"), SHA, ("active-cast",))
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: PatchFacts(files=(file,)))
    log = log_of(tmp_path, 0, dict.fromkeys(range(4), SHA))
    assert diagnose(log=str(log), ranks=True).exit is Exit.OK


def test_the_servers_arguments_as_the_newest_release_prints_them(tmp_path: Path, wheel_dir: TreeFactory) -> None:
    """0.5.23 logs a dict where older releases logged a dataclass; both say the ranks, and both begin a start."""
    source = (wheel_dir("0.5.23") / "sglang/srt/entrypoints/engine.py").read_text("utf-8")
    assert 'logger.info(f"server_args={_server_args_for_logging(server_args)}")' in source
    assert "_server_args_for_logging(server_args: ServerArgs) -> Dict[str, Any]" in source
    said: dict[str, object] = {
        "model_path": "/models/glm", "nccl_port": None, "port": 8000, "tp_size": 16, "moe_dp_size": 1, "pp_size": 1,
        "dp_size": 16, "nnodes": 2, "node_rank": 1, "enable_dp_attention": True, "page_size": 64,
        "decode_attention_backend": "x", "attention_backend": "flashinfer", "kv_cache_dtype": "fp8_e4m3",
        "mem_fraction_static": 0.92, "chunked_prefill_size": 8192,
    }  # fmt: skip
    shapes = [str(said), f"ServerArgs({', '.join(f'{key}={value!r}' for key, value in said.items())})"]
    facts = []
    for shape in shapes:
        found = Transcript()
        found.feed(f"[2026-11-29 10:00:00] server_args={shape}\n".encode())
        facts.append(found.facts)
        assert Layout.of(ServerOptions(), found.facts).names == tuple(f"TP{n}" for n in range(8, 16))
    assert facts[0] == facts[1]
    assert (facts[0]["port"], facts[0]["attention_backend"], facts[0]["dp"]) == ("8000", "flashinfer", "16")


def test_a_second_start_in_the_newest_form_forgets_the_first() -> None:
    found = Transcript()
    mark = f"[2026-11-29 10:00:02 TP0] mlapatch: active-cast active in {PATH} sha256={SHA}\n"
    died = "[2026-11-29 10:00:03] Received sigquit from a child process.\n"
    found.feed((mark + died + "[2026-11-29 10:00:04] server_args={'tp_size': 2}\n").encode())
    assert found.marks == []
    assert found.facts == {"tp": "2"}
