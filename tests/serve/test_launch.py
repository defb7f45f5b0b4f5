"""launch, stop and logs with real processes: a start that works, and one that fails in each phase and each way."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlapatch.commands.launch import launch
from mlapatch.commands.logs import logs
from mlapatch.commands.stop import stop
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome, Table, Warn
from mlapatch.serve.follow import Timing
from mlapatch.serve.preflight import PatchedFile, PatchFacts
from mlapatch.serve.run_record import load_all

FAKE = Path(__file__).parent / "fake_server.py"
ROOT = Path(__file__).parents[2]
FAST = Timing(look=0.03, poll=0.05, linger=0.3, report_silence=0.4)
PHASES = ("distributed-init", "weights", "kv-pool", "graph-capture", "warm-up")


def end_all(folder: Path) -> None:
    """Kill what a fake server that wrote to this folder has left behind."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("FAKE_TMP") == str(folder) and process.pid != os.getpid():
                process.kill()
        except psutil.Error:
            continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@dataclass
class Bench:
    """A folder, a port, and what launch said."""

    folder: Path
    port: int
    said: list[str] = field(default_factory=list)

    def command(self, *extra: str) -> list[str]:
        return [sys.executable, str(FAKE), "--port", str(self.port), *extra]

    def launch(self, *extra: str, **options: Any) -> Outcome:
        settings: dict[str, Any] = {
            "command": self.command(*extra),
            "logs": self.folder / "logs",
            "tell": self.said.append,
            "timing": FAST,
            "force": True,
            "name": "fake",
            "detach": True,
        }
        return launch(**(settings | options))

    def left_behind(self) -> list[str]:
        """Processes of this bench that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FAKE_TMP") == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    title = " ".join(process.cmdline())
                    if process.pid != os.getpid() and "log_pump" not in title:
                        found.append(title)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("FAKE_TMP", str(tmp_path))
    # Which SGLang this machine has is no part of these tests.
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: PatchFacts())
    found = Bench(tmp_path, free_port())
    yield found
    end_all(tmp_path)


def diagnosis(outcome: Outcome) -> dict[str, Any]:
    found = outcome.data["diagnosis"]
    assert isinstance(found, dict)
    return found


# ------------------------------------------------------------------------------------------------------ a good start
def test_detached_start_then_logs_then_stop(bench: Bench) -> None:
    outcome = bench.launch("--tp", "3")
    assert outcome.exit is Exit.OK, outcome.data
    assert outcome.data["state"] == "ready"
    phases = outcome.data["phases"]
    assert isinstance(phases, dict)
    assert "ready" in phases
    assert set(phases) <= {"start", *PHASES, "ready"}
    assert any("Paris" in line for line in bench.said)
    assert len(bench.left_behind()) == 4
    shown: list[str] = []
    logs(folder=bench.folder / "logs", lines=5, out=shown.append)
    assert any("fired up" in line for line in shown)
    listed = logs(folder=bench.folder / "logs", listing=True)
    assert listed.data["runs"][0]["state"] == "running"  # type: ignore[index]
    stopped = stop(logs=bench.folder / "logs")
    assert stopped.exit is Exit.OK
    assert len(stopped.data["stopped"]) == 1  # type: ignore[arg-type]
    assert bench.left_behind() == []
    assert load_all(bench.folder / "logs")[0].state == "stopped"
    record = load_all(bench.folder / "logs")[0]
    for again in ("", record.name, str(record.pid)):  # stopping twice is no error
        outcome = stop(name=again, logs=bench.folder / "logs")
        assert (outcome.exit, outcome.data) == (Exit.OK, {"stopped": []})
    for every in (False, True):
        with pytest.raises(MlapatchError) as raised:
            stop(name="fkae", logs=bench.folder / "logs", every=every)
        assert (raised.value.exit, raised.value.found) == (Exit.USAGE, "fake")
        assert "fkae" in raised.value.what


def test_stop_where_nothing_was_started(tmp_path: Path) -> None:
    assert stop(logs=tmp_path / "logs").exit is Exit.OK
    assert stop(logs=tmp_path / "logs", every=True).exit is Exit.OK
    with pytest.raises(MlapatchError) as raised:
        stop(name="active-cast", logs=tmp_path / "logs")
    assert raised.value.exit is Exit.USAGE


def test_stubborn_ranks_are_killed_by_stop(bench: Bench) -> None:
    bench.launch("--tp", "2", "--stubborn")
    stopped = stop(logs=bench.folder / "logs", grace=0.3)
    assert bench.left_behind() == []
    assert stopped.exit is Exit.OK


def test_followed_until_it_dies_while_serving(bench: Bench) -> None:
    outcome = bench.launch("--tp", "3", "--die-in", "ready", "--die-how", "kill", "--die-rank", "2", detach=False)
    assert outcome.exit is Exit.SERVER
    assert diagnosis(outcome)["rank"] == "TP2"
    assert diagnosis(outcome)["phase"] == "ready"
    assert "signal 9" in diagnosis(outcome)["cause"]
    assert bench.left_behind() == []


# ------------------------------------------------------------------------------------- each phase, each way to fail
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_rank_killed(bench: Bench, phase: str, rank: int) -> None:
    how = ["--die-in", phase, "--die-how", "kill", "--die-rank", str(rank)]
    outcome = bench.launch("--tp", "3", "--warm-up", "60", *how)
    found = diagnosis(outcome)
    assert outcome.exit is Exit.SERVER
    assert (found["rank"], found["rule"]) == (f"TP{rank}", "rank-killed")
    assert found["phase"] == phase
    assert "signal 9" in found["cause"]
    assert bench.left_behind() == []


@pytest.mark.parametrize("phase", PHASES)
def test_rank_raises(bench: Bench, phase: str) -> None:
    outcome = bench.launch(
        "--tp", "3", "--die-in", phase, "--die-rank", "1" if phase != "warm-up" else "0", "--warm-up", "9"
    )
    found = diagnosis(outcome)
    assert outcome.exit is Exit.SERVER
    assert (found["phase"], found["known"]) == (phase, False)
    assert "ZeroDivisionError: nobody has described this" in found["cause"]
    assert found["rank"] == ("TP1" if phase != "warm-up" else "TP0")
    assert bench.left_behind() == []


@pytest.mark.parametrize(
    ("phase", "rule"),
    [("weights", "weights-oom"), ("kv-pool", "pool-oom"), ("graph-capture", "capture-oom"), ("warm-up", "run-oom")],
)
def test_rank_out_of_memory(bench: Bench, phase: str, rule: str) -> None:
    outcome = bench.launch("--tp", "2", "--die-in", phase, "--die-how", "oom", "--warm-up", "9")
    assert diagnosis(outcome)["rule"] == rule
    assert diagnosis(outcome)["rank"] == "TP0"


@pytest.mark.parametrize("phase", PHASES)
def test_hang(bench: Bench, phase: str) -> None:
    outcome = bench.launch(
        "--tp", "2", "--die-in", phase, "--die-how", "hang", "--die-rank", "1", "--warm-up", "60", patience={phase: 0.8}
    )
    found = diagnosis(outcome)
    assert outcome.exit is Exit.SERVER
    assert (found["phase"], found["rule"]) == (phase, f"silent-{phase}")
    assert any("no new line for" in line for line in bench.said)
    assert bench.left_behind() == []


@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("phase", ["start", "warm-up"])
def test_the_parent_itself_ends(bench: Bench, phase: str, how: str) -> None:
    outcome = bench.launch("--tp", "2", "--die-in", phase, "--die-how", how, "--die-rank", "-1")
    found = diagnosis(outcome)
    assert outcome.exit is Exit.SERVER
    assert found["phase"] == phase
    assert ("signal 9" if how == "kill" else "exit code 3") in found["cause"]
    assert bench.left_behind() == []


@pytest.mark.parametrize(("how", "rule"), [("segv", "rank-segfault"), ("abort", "rank-aborted"), ("exit", "exited")])
def test_other_ends_are_not_called_out_of_memory(bench: Bench, how: str, rule: str) -> None:
    outcome = bench.launch("--tp", "2", "--die-in", "weights", "--die-how", how, "--die-rank", "1")
    assert diagnosis(outcome)["rule"] == rule


def test_a_crash_of_any_rank_is_reported(bench: Bench) -> None:
    done: list[Outcome] = []
    thread = threading.Thread(target=lambda: done.append(bench.launch("--tp", "3", timing=Timing(), detach=False)))
    thread.start()
    until(lambda: any("serving at" in line for line in bench.said))
    ranks = [
        p
        for p in psutil.process_iter()
        if "sglang::scheduler_TP2" in " ".join(_cmdline(p)) and str(bench.port) in _cmdline(p)
    ]
    assert len(ranks) == 1
    ranks[0].kill()
    thread.join(20)
    assert done[0].exit is Exit.SERVER
    assert diagnosis(done[0])["rank"] == "TP2"
    # Looked at four times a second, and a second for its last lines: reported within two.
    assert Timing().look + Timing().linger <= 2


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_bad_argument(bench: Bench) -> None:
    outcome = bench.launch("--die-in", "start", "--die-how", "argument")
    assert diagnosis(outcome)["rule"] == "bad-argument"
    assert "--nsa-prefill-backend" in diagnosis(outcome)["cause"]


def test_http_port_taken_behind_the_preflight(bench: Bench) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", bench.port))
        owner.listen()
        outcome = bench.launch("--tp", "2")
    assert diagnosis(outcome)["rule"] == "http-port-taken"
    assert bench.left_behind() == []


class Healthy(http.server.BaseHTTPRequestHandler):
    """A server that says it is well."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_health_of_an_older_server_on_the_port_is_not_ours(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H200: forced past the preflight, a start was called ready because another server answered."""
    monkeypatch.setattr("mlapatch.serve.follow.Follower._http_only", lambda self: self.poller is None)
    older = http.server.ThreadingHTTPServer(("127.0.0.1", bench.port), Healthy)
    threading.Thread(target=older.serve_forever, daemon=True).start()
    try:
        outcome = bench.launch("--die-in", "weights", "--die-how", "hang", patience={"weights": 1.5})
    finally:
        older.shutdown()
        older.server_close()
    assert outcome.exit is Exit.SERVER
    assert diagnosis(outcome)["phase"] == "weights"
    assert any(f"answered by pid {os.getpid()}" in line for line in bench.said), bench.said
    assert bench.left_behind() == []


# ----------------------------------------------------------------------------------------------- slow is not broken
def test_compiling_is_no_hang(bench: Bench) -> None:
    """Silent for longer than the patience, but one nvcc after the other runs below the scheduler until it is over."""
    timing = Timing(look=0.03, poll=0.05, linger=0.3, report_silence=0.2)
    outcome = bench.launch("--compile", "0.5", "--warm-up", "1.8", patience={"warm-up": 1.2}, timing=timing)
    assert outcome.exit is Exit.OK, outcome.data
    assert any("compiling kernels" in line for line in bench.said)


def test_one_compiler_that_never_ends_is_called_that(bench: Bench) -> None:
    outcome = bench.launch("--compile", "60", "--warm-up", "60", patience={"warm-up": 0.8})
    found = diagnosis(outcome)
    assert (found["rule"], found["phase"]) == ("silent-compiler", "warm-up")
    assert "nvcc" in found["cause"]
    assert bench.left_behind() == []


def test_503_for_ever_is_a_hang(bench: Bench) -> None:
    outcome = bench.launch("--never-healthy", patience={"warm-up": 1.0})
    found = diagnosis(outcome)
    assert (found["rule"], found["phase"]) == ("silent-warm-up", "warm-up")
    assert "503" in found["cause"]


# ------------------------------------------------------------------------------------------------------- after ready
@pytest.mark.parametrize(("answer", "words"), [("repeats", "repeats itself"), ("one-token", "stops after 1 token")])
def test_garbage(bench: Bench, answer: str, words: str) -> None:
    outcome = bench.launch("--answer", answer)
    assert outcome.exit is Exit.SERVER
    assert words in diagnosis(outcome)["cause"]
    assert "--attention-backend triton" in diagnosis(outcome)["advice"]
    assert bench.left_behind() == []


def test_garbage_of_the_triton_backend_is_not_sent_to_the_triton_backend(bench: Bench) -> None:
    outcome = bench.launch("--answer", "repeats", "--attention-backend", "triton")
    assert diagnosis(outcome)["advice"] == "compare with stock: mlapatch revert"


def test_garbage_without_a_tokenizer_and_with_dummy_weights(bench: Bench) -> None:
    outcome = bench.launch("--answer", "repeats", "--skip-tokenizer-init")
    assert "repeats one token" in diagnosis(outcome)["cause"]
    dummy = bench.launch("--answer", "repeats", "--load-format", "dummy", name="dummy")
    assert dummy.exit is Exit.OK


SHA = "ab" * 32


def patched(monkeypatch: pytest.MonkeyPatch, sha: str) -> None:
    file = PatchedFile(Path("/sp/sglang/srt/layers/attention/flashinfer_mla_backend.py"), sha, ("active-cast",))
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: PatchFacts(files=(file,)))


@pytest.mark.parametrize("tp", ["1", "3"])
def test_every_rank_logged_the_patched_file(bench: Bench, monkeypatch: pytest.MonkeyPatch, tp: str) -> None:
    patched(monkeypatch, SHA)
    path = "/sp/sglang/srt/layers/attention/flashinfer_mla_backend.py"
    outcome = bench.launch("--tp", tp, "--mark", path, SHA)
    assert outcome.exit is Exit.OK, outcome.data
    assert any("every rank has logged" in line for line in bench.said)


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        (
            ["--mark", "/sp/sglang/srt/layers/attention/flashinfer_mla_backend.py", SHA, "--unmarked", "1"],
            "rank TP1 has not",
        ),
        (["--mark", "/sp/sglang/srt/layers/attention/flashinfer_mla_backend.py", "cd" * 32], "status shows abab"),
        ([], "no rank has logged"),
    ],
)
def test_a_rank_that_runs_other_bytes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, marks: list[str], words: str
) -> None:
    patched(monkeypatch, SHA)
    outcome = bench.launch("--tp", "3", *marks)
    assert outcome.exit is Exit.SERVER
    assert words in diagnosis(outcome)["cause"]
    assert bench.left_behind() == []


def test_a_log_level_that_hides_the_marks_is_warned_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, SHA)
    outcome = bench.launch("--log-level", "error")
    assert outcome.exit is Exit.OK
    assert any(isinstance(block, Warn) and "--log-level error" in block.text for block in outcome.blocks)


# ------------------------------------------------------------------------------------------------- secrets, proxies
def test_secrets_are_in_no_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    outcome = bench.launch("--api-key", "sk-very-secret-key", "--mark", "hf_0123456789abcdef", SHA)
    assert outcome.exit is Exit.OK, outcome.data
    files = [path for path in (bench.folder / "logs").rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        text = path.read_text()
        assert "sk-very-secret-key" not in text
        assert "hf_0123456789abcdef" not in text
        assert "***" in text
    assert "sk-very-secret-key" not in json.dumps(outcome.data)


def test_proxies_are_not_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert bench.launch().exit is Exit.OK


# --------------------------------------------------------------------------------------------------- Ctrl-C, CLI
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_whole_tree(bench: Bench, number: int) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom mlapatch.commands import launch as m\n"
        "from mlapatch.serve.preflight import PatchFacts\nm.patch_facts = lambda *_: PatchFacts()\n"
        "try:\n    m.launch(command=sys.argv[2:], logs=Path(sys.argv[1]), force=True)\n"
        "except KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    command = [sys.executable, "-u", "-c", code, str(bench.folder / "logs"), *bench.command("--tp", "2")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "graph capture" in line or "serving at" in line:
                break
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(20) == 130
    assert bench.left_behind() == []


# -------------------------------------------------------------------------------------------------------- the script
def test_the_script_through_launch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real script; `sglang.launch_server` is the fake, which gets the real arguments."""
    site, model = bench.folder / "site" / "sglang", bench.folder / "model"
    (site / "srt").mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text('{"index_topk": 2048}')
    (site / "__init__.py").touch()
    (site / "srt" / "server_args.py").write_text("nsa_prefill_backend: str\n")
    (site / "launch_server.py").write_text(
        f"import os, sys\nos.execv(sys.executable, [sys.executable, {str(FAKE)!r}, *sys.argv[1:]])\n"
    )
    for name, value in {"PORT": str(bench.port), "MODEL_PATH": str(model), "TP_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(site.parent))
    facts = PatchFacts(package=site, python=sys.executable)
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: facts)
    script = ROOT / "scripts" / "run_tp8_cds16.sh"
    outcome = bench.launch(command=None, script=script, arguments=["--tp", "2"])
    assert outcome.exit is Exit.OK, outcome.data
    checks = {f["check"]: f for f in outcome.data["preflight"]}  # type: ignore[attr-defined]
    assert checks["KV layout"]["state"] == "ok"
    assert "chunked prefill size 64" in checks["page size"]["text"]
    record = load_all(bench.folder / "logs")[0]
    assert (record.port, record.command[-2:]) == (bench.port, ["--tp", "2"])
    assert record.facts == {"attention_backend": "flashinfer"}, "for `diagnose`; the command has only the script"
    stop(logs=bench.folder / "logs")
    assert bench.left_behind() == []
    with pytest.raises(MlapatchError) as raised:
        bench.launch(command=None, script=script, arguments=["--page-size"])
    assert raised.value.exit is Exit.USAGE
    assert "--page-size needs a whole number" in raised.value.found
    assert len(load_all(bench.folder / "logs")) == 1, "nothing was started"
    monkeypatch.delenv("MODEL_PATH")
    with pytest.raises(MlapatchError) as raised:
        bench.launch(command=None, script=script)
    assert raised.value.exit is Exit.ENVIRONMENT
    assert "MODEL_PATH" in raised.value.found


# ------------------------------------------------------------------------------------------------------- preflight
def test_preflight_stops_before_a_process_starts(bench: Bench) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", bench.port))
        owner.listen()
        outcome = bench.launch("--model-path", str(bench.folder / "none"), force=False)
    assert outcome.exit is Exit.ENVIRONMENT
    failed = {f["check"]: f["text"] for f in outcome.data["preflight"] if f["state"] == "fail"}  # type: ignore[attr-defined]
    assert "does not exist" in failed["model"]
    assert f"pid {os.getpid()}" in failed["port"]
    assert not (bench.folder / "logs").exists()


@pytest.mark.parametrize("state", ["violated", "unrecorded"])
def test_guard_refuses_even_when_forced(bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    facts = PatchFacts(guard=state, guard_text="server_args.py: an edit is gone")
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: facts)
    outcome = bench.launch(force=True)
    assert outcome.exit is Exit.REFUSED
    assert not (bench.folder / "logs").exists()


@pytest.mark.parametrize("taken", [False, True])
def test_force_does_not_take_back_require(bench: Bench, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """`--require` asks to be refused: exit 5 with --force as without; the other failures are forced past as ever."""
    facts = PatchFacts(required=("active-cast",), verdicts={"active-cast": ("applicable", "not applied")})
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: facts)
    with socket.socket() as owner:
        if taken:
            owner.bind(("127.0.0.1", bench.port))
            owner.listen()
        said = [bench.launch(force=force) for force in (False, True)]
    assert [outcome.exit for outcome in said] == [Exit.ENVIRONMENT] * 2
    assert not (bench.folder / "logs").exists()
    for outcome in said:
        shown = " ".join(str(block) for block in outcome.blocks)
        assert "not started: patches: active-cast is required" in shown
        assert "--force does not go past --require" in shown
        assert "starts it all the same" not in shown


def test_dry_run_shows_the_whole_preflight(bench: Bench) -> None:
    outcome = bench.launch(dry_run=True, force=False)
    assert outcome.exit is Exit.OK
    checks = {f["check"] for f in outcome.data["preflight"]}  # type: ignore[attr-defined]
    assert {"sglang", "patches", "model", "port", "gpus"} <= checks
    assert not (bench.folder / "logs").exists()


def test_dry_run_lists_what_it_skips_and_why(bench: Bench) -> None:
    """A command of which the SGLang is not known, and a model that is not here."""
    start = bench.folder / "start.sh"
    start.write_text("#!/bin/sh\n")
    start.chmod(0o755)
    outcome = bench.launch(command=[str(start), "--model-path", "zai-org/GLM-5"], dry_run=True, force=False)
    assert outcome.exit is Exit.OK
    found: Any = outcome.data["preflight"]
    skipped = {f["check"]: f["text"] for f in found if f["state"] == "skip"}
    no_sglang = {"sglang", "patches", "guard", "libraries", "effect"}
    assert set(skipped) == no_sglang | {"port", "page size", "KV layout"}
    for check in no_sglang:
        assert skipped[check].startswith(f"NOT looked at: {start} does not say which Python it uses")
    assert "config.json" in skipped["page size"]
    assert "config.json" in skipped["KV layout"]
    assert {f["check"] for f in found} == set(skipped) | {"command", "model", "gpus", "tools", "CUDA graphs"}
    table = next(block for block in outcome.blocks if isinstance(block, Table))
    assert {(row[1], row[2]) for row in table.rows if row[0] == "skip"} == set(skipped.items())


def test_nothing_to_run(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError) as raised:
        launch(command=[], logs=tmp_path)
    assert raised.value.exit is Exit.USAGE


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-program", "is no program here"),
        ("no-such-folder/python", "is no program here"),
        ("python3.99", "is no program here"),
        ("notes.txt", "may not run it"),
    ],
)
def test_a_program_that_is_not_there(bench: Bench, name: str, words: str, dry_run: bool, force: bool) -> None:
    """The dry run says what the start would find, and --force promises nothing."""
    (bench.folder / "notes.txt").touch()
    word = str(bench.folder / name) if name == "notes.txt" else name
    outcome = bench.launch(command=[word, "-m", "sglang.launch_server"], dry_run=dry_run, force=force)
    assert outcome.exit is Exit.ENVIRONMENT
    found: Any = outcome.data["preflight"]
    (finding,) = [f for f in found if f["check"] == "command"]
    assert finding["state"] == "fail"
    assert finding["text"].startswith(word)
    assert words in finding["text"]
    assert "executable" in finding["next"]
    assert "--force cannot start it either" in " ".join(map(str, outcome.blocks))
    assert not (bench.folder / "logs").exists()
