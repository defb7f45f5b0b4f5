"""Every known failure as a log, the real logs, and logs as they come: huge, noisy, coloured, cut off."""

from __future__ import annotations

import io
import json
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.diagnose import diagnose, read
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.serve.diagnosis import diagnose as decide
from mlapatch.serve.rules import fill, load
from mlapatch.serve.run_record import RunRecord
from mlapatch.serve.server_options import ServerOptions
from mlapatch.serve.transcript import Transcript
from mlapatch.serve.verdicts import Diagnosis, Ending, Silence

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
CASES = HERE / "cases"
LOGS = HERE / "data"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((CASES / "expected.toml").read_text("utf-8"))


def case(name: str) -> bytes:
    return (CASES / f"{name}.log").read_bytes()


def of(log: bytes) -> Diagnosis:
    return read(io.BytesIO(log))


KILLED = b"RuntimeError: Rank 3 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), ..."


def spoken(rank: str, text: str) -> bytes:
    return f"[2026-11-29 11:10:29 {rank}] {text}\n".encode()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_case(name: str) -> None:
    found, expected = of(case(name)), EXPECTED[name]
    assert (found.verdict, found.rule, found.phase) == (expected["verdict"], expected["rule"], expected["phase"])
    assert found.rank == expected.get("rank")
    for words in expected["says"]:
        assert words in found.cause
    assert found.advice
    assert "{" not in found.cause + found.advice.replace("{decode,prefill}", "")
    assert "not in the log" not in found.cause + found.advice
    number = re.match(r"(\d\d)-", name)
    if number and found.verdict not in ("running",) and name != "34-half-raw-pool":
        assert found.case == int(number[1])


def test_every_case_log_has_a_row() -> None:
    assert {path.stem for path in CASES.glob("*.log")} == set(EXPECTED)


# ------------------------------------------------------------------------------------------------------- real logs
def test_ignored_import_of_the_configured_model_outranks_the_crash() -> None:
    found = of((LOGS / "crash-shape-mismatch-0.5.15.post1.log").read_bytes())
    assert (found.rule, found.phase, found.rank, found.case) == ("fallback-model", "warm-up", "TP0", 37)
    assert "DeepseekV3ForCausalLM" in found.cause
    assert "deepseek_v2: No module named 'cutlass'" in found.cause
    assert "nvidia-cutlass-dsl" in found.advice
    assert any("shape mismatch" in line for line in found.evidence)


def test_missing_config_attribute() -> None:
    found = of((LOGS / "crash-config-attribute-0.5.15.post1.log").read_bytes())
    assert (found.rule, found.phase, found.rank, found.case) == ("config-attribute", "weights", "TP0", 38)
    assert "moe_layer_freq" in found.cause


def test_healthy_log_is_no_failure() -> None:
    found = of((LOGS / "healthy-0.5.15.post1.log").read_bytes())
    assert (found.verdict, found.phase, found.is_failure) == ("ready", "ready", False)


def test_long_warm_up_is_no_failure() -> None:
    found = of((LOGS / "warmup-jit-0.5.15.post1.log").read_bytes())
    assert (found.verdict, found.phase, found.case, found.is_failure) == ("running", "warm-up", 39, False)
    assert "114 times" in found.cause


def test_every_prefix_of_a_healthy_log_is_no_failure() -> None:
    lines = (LOGS / "healthy-0.5.15.post1.log").read_bytes().splitlines(keepends=True)
    for end in range(len(lines) + 1):
        assert not of(b"".join(lines[:end])).is_failure


# -------------------------------------------------------------------------------------------------------- as they come
def test_empty_and_foreign_logs() -> None:
    assert of(b"").verdict == "empty"
    assert of(b"hello\nworld\n").verdict == "empty"
    assert not of(bytes(range(256)) * 4096).is_failure


@pytest.mark.parametrize("name", ["17-capture-oom", "14-weights-oom", "23-fp8-plan-fa2"])
def test_cut_anywhere_into_chunks_says_the_same(name: str) -> None:
    log, whole = case(name), of(case(name))
    for size in (1, 7, 4096):
        transcript = Transcript()
        for start in range(0, len(log), size):
            transcript.feed(log[start : start + size])
        transcript.close()
        assert decide(transcript).as_dict() == whole.as_dict()


def test_ansi_binary_noise_and_carriage_returns() -> None:
    noisy = case("14-weights-oom").replace(b"\n", b"\r\n").replace(b"Scheduler hit", b"\x1b[1;31mScheduler\x1b[0m hit")
    noisy = b"\x00\xff\xfe\x80" * 1000 + b"\n" + noisy.replace(b"torch.Out", b"\x00torch.Out")
    found = of(noisy)
    assert (found.rule, found.rank, found.phase) == ("weights-oom", "TP5", "weights")
    assert not any("\x1b" in line or "\x00" in line for line in found.evidence)


def test_record_glued_to_a_progress_bar() -> None:
    log = case("17-capture-oom").replace(b"it/s]\n[2026", b"it/s][2026")
    assert b"it/s][2026" in log
    found = of(log)
    assert (found.rule, found.rank) == ("capture-oom", "TP7")


@pytest.mark.parametrize(
    "carrier",
    [
        "sglang-1  | ",
        "2026-11-29T11:27:06.123456789Z ",
        "2026-11-29T11:27:06.1Z stderr F ",
        "Nov 29 11:27:06 gpu7 python[812]: ",
    ],
)
def test_logs_carried_by_docker_kubernetes_and_journald(carrier: str) -> None:
    log = b"".join(carrier.encode() + line for line in case("14-weights-oom").splitlines(keepends=True))
    found = of(log)
    assert (found.rule, found.rank, found.phase) == ("weights-oom", "TP5", "weights")


def test_truncated_inside_the_traceback_is_still_a_failure_of_that_rank() -> None:
    log = case("17-capture-oom")
    cut = of(log[: log.index(b"torch.OutOfMemoryError")])
    assert (cut.verdict, cut.rank, cut.phase, cut.known) == ("failed", "TP7", "graph-capture", False)


def test_head_is_missing() -> None:
    log = case("14-weights-oom")
    found = of(log[log.index(b"TP5] Scheduler hit") - 21 :])
    assert (found.rule, found.rank, found.phase) == ("oom", "TP5", "unknown")


def test_a_line_of_many_megabytes_is_cut() -> None:
    found = of(b"x" * 5_000_000 + b"\n" + case("20-ninja-missing"))
    assert found.rule == "ninja-missing"


def test_restarted_server_tells_of_the_last_start() -> None:
    found = of(case("14-weights-oom") + case("20-ninja-missing"))
    assert (found.rule, found.rank) == ("ninja-missing", "TP0")
    healthy = (LOGS / "healthy-0.5.15.post1.log").read_bytes()
    assert of(case("14-weights-oom") + healthy).verdict == "ready"


def test_request_errors_after_ready_are_no_failure() -> None:
    log = (LOGS / "healthy-0.5.15.post1.log").read_bytes()
    log += b'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: bad request\n'
    assert of(log).verdict == "ready"


def test_health_that_recovered_is_no_failure() -> None:
    log = case("32-health-503") + b'[2026-11-29 11:50:00] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n'
    assert of(log).verdict == "ready"


def test_same_words_in_another_phase_mean_another_thing() -> None:
    names = {"weights-oom", "pool-oom", "capture-oom", "run-oom"}
    assert {of(case(n)).rule for n in ("14-weights-oom", "15-pool-oom", "17-capture-oom", "18-run-oom")} == names


@pytest.mark.parametrize(
    ("backend", "advised", "not_advised"),
    [
        ("flashinfer", ["--attention-backend triton", "mlapatch status"], "--attention-backend flashinfer"),
        ("triton", ["--attention-backend flashinfer"], "triton;"),
        ("flashmla", ["--attention-backend flashinfer or triton"], "status"),
        (None, ["--attention-backend flashinfer or triton"], "status"),
    ],
)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "fp8_e4m3"])
def test_fp8_advice_names_no_backend_that_was_already_chosen(
    backend: str | None, advised: list[str], not_advised: str, dtype: str
) -> None:
    log = case("28-fp8-kv-rejected").replace(b"float8_e4m3fn", dtype.encode())
    named = f"attention_backend={backend!r}".encode()
    found = of(log.replace(b"attention_backend='flashinfer'", named))
    assert found.rule == "fp8-kv-rejected"
    for words in advised:
        assert words in found.advice
    assert not_advised not in found.advice
    assert "bfloat16" in found.advice
    if backend:  # the command names it, the log does not (--log-level error)
        transcript = Transcript(known=ServerOptions.of(["--attention-backend", backend]).facts)
        transcript.feed(log.replace(b"attention_backend='flashinfer'", b""))
        assert decide(transcript).advice == found.advice
        transcript = Transcript(known=ServerOptions.of(["--attention-backend", "fa3"]).facts)
        transcript.feed(log.replace(b"attention_backend='flashinfer'", named))
        assert decide(transcript).advice == found.advice, "the log outranks the command"


def test_advice_by_backend_can_be_filled_and_is_not_circular() -> None:
    for rule in load().rules:
        for backend, advice in rule.advice_for.items():
            assert f"--attention-backend {backend}" not in fill(advice, {})


def test_rules_say_where_they_come_from_and_texts_can_be_filled() -> None:
    book = load()
    for rule in book.rules:
        assert rule.source
        assert rule.tag in {"R", "S", "C", "L"}
        assert rule.match.contains == rule.match.contains.lower()
        assert rule.phase is None or rule.phase in {p.id for p in book.phases}
        assert rule.when <= {p.id for p in book.phases} | {"unknown"}
        fill(rule.cause, {})
        fill(rule.advice, {})
    assert set(book.silences) == {p.id for p in book.phases}


def test_optional_parts_are_dropped_where_a_value_is_unknown() -> None:
    assert fill("a[[ of {x}]] b", {}) == "a b"
    assert fill("a[[ of {x}]] b", {"x": "{y}"}) == "a of {y} b"


# -------------------------------------------------------------------------------------- a package that is not there
MISSING = case("module-missing")
BEGUN = b"[2026-11-29 11:10:01] server_args=ServerArgs(model_path='/m', tp_size=1)\n"
TRIED = b"""Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/utils/common.py", line 9, in try_it
    import deep_gemm
ModuleNotFoundError: No module named 'deep_gemm'
"""
SCRIPT = TRIED.replace(b"/opt/venv/lib/python3.11/site-packages/sglang", b"/w").replace(b"try_it", b"<module>")
CHILD = b"""Process SpawnProcess-1:
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap
    self.run()
  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 9, in run
    import orjson
ModuleNotFoundError: No module named 'orjson'
"""


def test_a_missing_package_is_named_with_its_python_and_no_line_that_has_nothing_to_do_with_it() -> None:
    found = of(MISSING)
    assert found.known
    assert "/opt/venv/bin/python -m pip install numpy" in found.advice
    assert "mlapatch doctor --python /opt/venv/bin/python" in found.advice
    spaced = of(MISSING.replace(b"/opt/venv", b"/my venv"))
    assert "missing in /my venv/bin/python" in spaced.cause
    assert "Run: '/my venv/bin/python' -m pip install numpy" in spaced.advice
    assert "mlapatch doctor --python '/my venv/bin/python' shows" in spaced.advice
    assert "cpp extensions" not in found.advice + " ".join(found.evidence)


@pytest.mark.parametrize("code", [1, None])
def test_a_missing_package_outranks_how_the_process_ended(code: int | None) -> None:
    transcript = Transcript()
    transcript.feed(MISSING + b"a last word at exit\n")
    assert decide(transcript, ending=Ending("the server process", code)).rule == "module-missing"


@pytest.mark.parametrize(
    ("log", "module"),
    [
        (BEGUN + CHILD, "orjson"),
        (BEGUN + CHILD + b"[2026-11-29 11:10:09] Received sigquit from a child process. It means ...\n", "orjson"),
        (BEGUN + CHILD + KILLED.replace(b"-9", b"1") + b"\n", "orjson"),
        (BEGUN + spoken("TP1", "Scheduler hit an exception: Traceback (most recent call last):") + TRIED, "deep_gemm"),
        (SCRIPT, "deep_gemm"),
        (BEGUN + CHILD + KILLED.replace(b"-9", b"1") + b"\n" + KILLED.replace(b"Rank 3", b"Rank 0") + b"\n", "orjson"),
    ],
)
def test_an_import_that_ended_a_process(log: bytes, module: str) -> None:
    found = of(log.replace(b"last):\nTraceback (most recent call last):", b"last):"))
    assert found.rule == "module-missing", found
    assert f"could not import {module}" in found.cause


def test_a_package_whose_name_the_import_does_not_say_is_not_guessed() -> None:
    found = of(MISSING.replace(b"'numpy'", b"'my_plugin.part'"))
    assert "could not import my_plugin.part" in found.cause
    assert "pip install" not in found.advice
    elsewhere = of(MISSING.replace(b"/opt/venv/lib/python3.11/site-packages", b"/root/sglang/python"))
    assert elsewhere.cause == "The server could not import numpy: it is missing"
    assert "Run: pip install numpy" in elsewhere.advice


@pytest.mark.parametrize(
    "log",
    [
        BEGUN + TRIED,  # the function above may have handled it
        BEGUN + TRIED + spoken("TP0", "Init torch distributed begin."),
        BEGUN + TRIED.replace(b"try_it", b"<module>"),  # a module that does without it
        BEGUN + b"Exception in thread Thread-1:\n" + CHILD.split(b"\n", 1)[1].replace(b"_boot", b"_boot_inner_"),
        BEGUN + CHILD + b"[2026-11-29 11:10:09] Load weight begin. avail mem=93.81 GB\n",  # a helper, not the server
        BEGUN + CHILD + b"[2026-11-29 11:10:09] and the server goes on\n",
        (LOGS / "healthy-0.5.15.post1.log").read_bytes() + MISSING,
        SCRIPT + b"going on\n",  # traceback.print_exc()
        SCRIPT + b"[2026-11-29 11:10:09] going on\n[2026-11-29 11:10:09] Received sigquit from a child process.\n",
        SCRIPT + b"Killed\n",
        SCRIPT + b"Segmentation fault (core dumped)\n",
        BEGUN + CHILD + b"run.sh: line 3:  1234 Killed                  python -m sglang.launch_server\n",
        BEGUN + CHILD + b"[2026-11-29 11:10:09] and the server goes on\nKilled\n",
        BEGUN + CHILD + b"[2026-11-29 11:10:09] and the server goes on\n" + KILLED + b"\n",
    ],
)
def test_an_import_that_may_have_been_handled_is_not_called_the_cause(log: bytes) -> None:
    assert of(log).rule != "module-missing"


@pytest.mark.parametrize("code", [1, None])
def test_an_import_that_a_script_handled_is_no_cause_of_a_later_exit(code: int | None) -> None:
    for after, blamed in ((b"", True), (b"going on\n", False), (b"[2026-11-29 11:10:09] going on\n", False)):
        transcript = Transcript()
        transcript.feed(SCRIPT + after)
        found = decide(transcript, ending=Ending("the server process", code))
        assert (found.rule == "module-missing") is blamed, after


def test_a_file_that_shadows_a_package_is_not_called_missing() -> None:
    found = of(MISSING.replace(b"'numpy'", b"'torch.distributed'; 'torch' is not a package"))
    assert (found.rule, found.known) == ("unknown", False)
    assert "'torch' is not a package" in found.cause
    assert "pip install" not in found.advice


def test_of_a_user_install_no_python_is_named() -> None:
    """/root/.local/bin/python was: there is none."""
    home, user = b"/opt/venv/lib/python3.11", b"/root/.local/lib/python3.12"
    found = of(MISSING.replace(home, user))
    assert found.cause == "The server could not import numpy: it is missing"
    assert "Run: pip install numpy" in found.advice
    assert ".local/bin" not in found.advice
    plugin = b"/opt/venv/lib/python3.11/site-packages/sglang/lang/choices.py"
    assert "missing in /opt/venv/bin/python" in of(MISSING.replace(plugin, user + b"/site-packages/plugin.py")).cause


def test_a_handled_import_is_no_cause_of_a_kill() -> None:
    for log in (BEGUN + TRIED, BEGUN + CHILD):
        transcript = Transcript()
        transcript.feed(log)
        assert decide(transcript, ending=Ending("sglang::scheduler", -9)).rule == "rank-killed"


# -------------------------------------------------------------------------------------------------- what launch adds
def test_ending_without_a_log_line() -> None:
    transcript = Transcript()
    transcript.feed(case("10-nccl-hang"))
    found = decide(transcript, ending=Ending("sglang::scheduler_TP3", -9, "TP3"))
    assert (found.verdict, found.rank, found.phase, found.case) == ("failed", "TP3", "distributed-init", 19)
    unknown = decide(transcript, ending=Ending("sglang::scheduler_TP3", 1, "TP3"))
    assert not unknown.known
    assert "exit code 1" in unknown.cause


def test_an_unknown_exception_outranks_the_kill_that_it_caused() -> None:
    transcript = Transcript()
    transcript.feed(case("unknown-exception"))
    found = decide(transcript, ending=Ending("sglang::scheduler_TP0", -9, "TP0"))
    assert (found.rule, found.rank) == ("unknown", "TP3")


def test_a_known_cause_in_the_log_outranks_how_the_process_ended() -> None:
    transcript = Transcript()
    transcript.feed(case("14-weights-oom"))
    assert decide(transcript, ending=Ending("launch_server", -9)).rule == "weights-oom"


@pytest.mark.parametrize(("name", "phase"), [("10-nccl-hang", "distributed-init"), ("12-only-a-warning", "weights")])
def test_silence(name: str, phase: str) -> None:
    transcript = Transcript()
    transcript.feed(case(name))
    found = decide(transcript, silence=Silence(180, pid=77, gpu_percent=100))
    assert (found.verdict, found.phase, found.rule) == ("failed", phase, f"silent-{phase}")
    assert "180 s" in found.cause
    assert "77" in found.advice
    if phase == "distributed-init":
        assert found.case == 10
        assert "GPUs at 100 %" in found.cause


@pytest.mark.parametrize("carrier", [b"", b"sglang-1  | "])
@pytest.mark.parametrize("prefix", ["", "DP0 ", "PP0 "])
def test_a_killed_rank_is_shown_by_its_own_last_lines(prefix: str, carrier: bytes) -> None:
    """Other ranks go on talking after it, and the parent that reports it says nothing of what it did."""
    log = b"".join(spoken(f"{prefix}TP{n}", "Init torch distributed begin.") for n in range(4))
    log += spoken(f"{prefix}TP3", "Load weight begin. avail mem=93.81 GB")
    log += spoken(f"{prefix}TP3", "Loading safetensors checkpoint shards: error count 0, the last of rank 3")
    log += b"".join(spoken(f"{prefix}TP{n}", "Init torch distributed ends. elapsed=1 s") for n in range(3))
    log = b"".join(carrier + line for line in log.splitlines(keepends=True))
    transcript = Transcript()
    transcript.feed(log)
    by_table = decide(transcript, ending=Ending("sglang::scheduler", -9, f"{prefix}TP3"))
    by_parent = of(log + carrier + KILLED + b"\n")
    for found in (by_table, by_parent):
        assert (found.rule, found.rank, found.phase) == ("rank-killed", f"{prefix}TP3", "weights")
        ranks = {line.rank for line in found.lines}
        assert f"{prefix}TP3" in ranks
        assert ranks <= {f"{prefix}TP3", None}, found.evidence
        assert any("the last of rank 3" in line for line in found.evidence)


def test_a_killed_rank_without_lines_of_its_own_is_shown_by_the_log() -> None:
    transcript = Transcript()
    transcript.feed(spoken("TP0", "Load weight begin. avail mem=93.81 GB"))
    found = decide(transcript, ending=Ending("sglang::scheduler_TP3", -9, "TP3"))
    assert [line.rank for line in found.lines] == ["TP0"]


def test_a_killed_rank_that_said_nothing_of_a_start() -> None:
    found = of(spoken("TP0", "Load weight begin. avail mem=93.81 GB") + spoken("TP3", "hello") + KILLED + b"\n")
    assert (found.rank, found.evidence[0]) == ("TP3", "[2026-11-29 11:10:29 TP3] hello")


def test_of_replicas_with_the_same_number_none_is_picked() -> None:
    log = b"".join(spoken(f"DP{n} TP3", "Load weight begin. avail mem=93.81 GB") for n in range(2))
    found = of(log + KILLED + b"\n")
    assert (found.rank, {line.rank for line in found.lines}) == ("TP3", {None})


@pytest.mark.parametrize("part", ["DP", "PP"])
def test_a_silent_rank_is_not_taken_for_the_one_of_another_replica_or_stage(part: str) -> None:
    """Of the second only TP3 has said nothing, so the one TP3 that has spoken is not the one that died."""
    texts = ("Load weight begin. avail mem=93.81 GB", "Load weight end. avail mem=9 GB")
    log = b"".join(spoken(f"{part}0 TP{n}", text) for text in texts for n in range(4))
    log += b"".join(spoken(f"{part}1 TP{n}", "Init torch distributed begin.") for n in range(3))
    found = of(log + KILLED + b"\n")
    assert (found.rank, {line.rank for line in found.lines}) == ("TP3", {None})
    assert found.phase == "distributed-init"


# ------------------------------------------------------------------------------------------------------------ the verb
def test_unreadable_log(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError) as raised:
        diagnose(log=str(tmp_path / "none.log"))
    assert raised.value.exit is Exit.ENVIRONMENT


SAYS = b"attention_backend='flashinfer'"


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        (["python", "-m", "sglang.launch_server", "--attention-backend", "flashinfer"], {}),
        (["bash", "run_tp8_cds16.sh"], {"attention_backend": "flashinfer"}),
    ],
)
def test_the_run_record_beside_a_log_names_the_backend_that_the_log_hides(
    tmp_path: Path, command: list[str], facts: dict[str, str]
) -> None:
    """`launch` keeps what a script said it would run: the script's own command does not say it."""
    log, said = tmp_path / "logs" / "s.log", case("28-fp8-kv-rejected")
    log.parent.mkdir()
    log.write_bytes(said)
    wanted = diagnose(log=str(log)).data["advice"]
    log.write_bytes(said.replace(SAYS, b""))
    assert diagnose(log=str(log)).data["advice"] != wanted, "there is no record yet"
    RunRecord("s", 1, 1.0, 1, "now", str(log), command, facts=facts).save()
    assert diagnose(log=str(log)).data["advice"] == wanted
    log.write_bytes(said.replace(SAYS, SAYS.replace(b"flashinfer", b"fa3")))
    assert "under attention backend fa3" in str(diagnose(log=str(log)).data["cause"]), "the log outranks it"
    moved = log.parent.rename(tmp_path / "moved") / log.name
    moved.write_bytes(said.replace(SAYS, b""))
    assert diagnose(log=str(moved)).data["advice"] == wanted
    other = moved.rename(moved.with_suffix(".txt"))
    assert diagnose(log=str(other)).data["advice"] != wanted, "another file than the record's log"


@pytest.mark.parametrize(
    "change",
    [
        {"command": "python"},
        {"command": [["--attention-backend"]]},
        {"facts": []},
        {"facts": {"attention_backend": []}},
        {"created": None},
        {"more": 1},
        None,
    ],
)
def test_a_damaged_record_beside_a_log_is_no_record(tmp_path: Path, change: dict[str, Any] | None) -> None:
    log = tmp_path / "s.log"
    log.write_bytes(case("28-fp8-kv-rejected").replace(SAYS, b""))
    without = diagnose(log=str(log)).data
    record = RunRecord("s", 1, 1.0, 1, "now", str(log), ["x", "--attention-backend", "flashinfer"])
    record.save()
    assert diagnose(log=str(log)).data != without
    record.path.write_text("{" if change is None else json.dumps(json.loads(record.path.read_text()) | change))
    assert diagnose(log=str(log)).data == without
    record.path.unlink()
    record.path.mkdir()
    assert diagnose(log=str(log)).data == without


def test_json_contract() -> None:
    outcome = diagnose(log=str(CASES / "14-weights-oom.log"))
    assert outcome.exit is Exit.OK
    assert {"cause", "phase", "rank", "evidence", "advice"} <= set(outcome.data)
    assert outcome.data["rank"] == "TP5"
    assert isinstance(outcome.data["evidence"], list)


class _Long(io.RawIOBase):
    """A log of a given size without a file: a start, serving lines for ever, an end."""

    def __init__(self, size: int, head: bytes, body: bytes, tail: bytes) -> None:
        self.left, self.head, self.body, self.tail = size, head, body, tail

    def read(self, size: int = -1) -> bytes:  # noqa: ARG002
        if self.head:
            out, self.head = self.head, b""
        elif self.left > 0:
            out = self.body
            self.left -= len(out)
        else:
            out, self.tail = self.tail, b""
        return out


def test_a_long_log_is_read_in_bounded_memory() -> None:
    serving = [
        b"[2026-11-29 12:00:01 TP0] Decode batch, #running-req: 1, #token: 536, token usage: 0.00, cuda graph: True\n",
        b'[2026-11-29 12:00:01] INFO:     127.0.0.1:46410 - "GET /health HTTP/1.1" 200 OK\n',
        b"[2026-11-29 12:00:02 TP3] Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 0, token usage: 0.02\n",
        b'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: bad request\n',
    ]
    ready = case("19-aborted-while-serving")
    cut = ready.index(b"[", ready.index(b"fired up"))
    peaks = []
    for size in (500_000, 5_000_000):
        tracemalloc.start()
        found = read(_Long(size, ready[:cut], b"".join(serving) * 1000, ready[cut:]))  # type: ignore[arg-type]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (found.rule, found.rank, found.phase) == ("rank-aborted", "TP2", "ready")
    assert peaks[1] < peaks[0] * 1.2
