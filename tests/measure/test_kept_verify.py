"""`verify` keeps a run: what passed, what differs, what was broken off; and a store that fails it changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mlapatch.catalogue import load_catalogue
from mlapatch.cli import measuring, patching
from mlapatch.commands.verify import verify
from mlapatch.compat import Silent
from mlapatch.measure.runs import Run, Store, default_path
from mlapatch.verify.runner import Job, Report, ScenarioResult, scenario_names
from tests.conftest import TreeFactory

FACTS = {"python": "3.12.3", "torch": "2.13.0", "machine": {"cores": 2}}


def invoke(*arguments: object, **environment: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    patching.register(app)
    measuring.register(app)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the processes that run scenarios: `fails` are patches that differ, `raises` by patch."""
    does: dict[str, Any] = {"fails": (), "raises": {}}

    def run_job(job: Job, *, done: Callable[[str], None], **_: object) -> Report:
        done("decode-eager")
        if job.patch in does["raises"]:
            raise does["raises"][job.patch]
        decode = "fail" if job.patch in does["fails"] else "pass"
        results = [
            ScenarioResult("decode-eager", decode, float("inf") if decode == "fail" else 0.0, "", 0.5),  # type: ignore[arg-type]
            ScenarioResult("extend-paged", "skip", None, "not this release", 0.0),
        ]
        return Report(results, FACTS)

    monkeypatch.setattr("mlapatch.commands.verify.run_job", run_job)
    monkeypatch.setattr("mlapatch.commands.verify._interpreter", lambda *_: "python")
    return does


def kept(db: Path) -> list[Run]:
    with Store(db) as store:
        return store.all()


def test_a_pass_is_kept_with_its_set_up(harness: dict[str, Any], install_tree: TreeFactory, tmp_path: Path) -> None:
    site, db = install_tree("0.5.9"), tmp_path / "db"
    done = invoke("verify", "active-cast", "gather-cast", "--sglang", site, "--label", "both", "--db", db, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    (run,) = kept(db)
    assert (run.id, run.kind, run.label, run.state) == (said["run"], "verify", "both", "done")
    assert (run.setup["sglang"], run.setup["device"], run.setup["ran_with"]) == ("0.5.9", "cpu", FACTS)
    digests = {name: patch.digest for name, patch in load_catalogue().patches.items()}
    assert run.setup["patches"] == {name: {name: digests[name]} for name in ("active-cast", "gather-cast")}
    for patch in said["patches"]:
        assert run.setup["files"][patch["name"]] == {
            "stock": patch["stock_sha256"], "patched": patch["patched_sha256"]
        }  # fmt: skip
    assert run.result["result"] == "pass"
    assert run.result["outcome"]["active-cast"] == {
        "result": "pass", "failed": [], "scenarios": {"pass": 1, "skip": 1}
    }  # fmt: skip
    assert [(m["case"], m["name"], m["unit"]) for m in run.result["metrics"]] == [
        ("active-cast", "seconds", "s"),
        ("gather-cast", "seconds", "s"),
    ]


def test_a_failing_verify_is_kept_as_such(harness: dict[str, Any], install_tree: TreeFactory, tmp_path: Path) -> None:
    site, db = install_tree("0.5.9"), tmp_path / "db"
    verify: Callable[..., Any] = lambda: invoke("verify", "active-cast", "--sglang", site, MLAPATCH_DB=str(db))  # noqa: E731
    assert verify().exit_code == 0
    harness["fails"] = ("active-cast",)
    assert verify().exit_code == 1
    run = kept(db)[0]
    assert (run.state, run.result["result"]) == ("failed", "fail")
    assert run.result["outcome"]["active-cast"]["failed"] == ["decode-eager"]
    listed = invoke("runs", "--kind", "verify", "--db", db).stdout
    assert "state: failed" in listed
    assert "result: fail: active-cast (decode-eager)" in listed
    assert "result: pass: active-cast" in listed
    shown = invoke("runs", "last", "--db", db).stdout
    assert "what came out: active-cast.failed  is: decode-eager" in shown
    compared = invoke("compare", "1", "2", "--db", db, "--json")
    (pair,) = json.loads(compared.stdout)["pairs"]
    assert pair["setup"] == []
    assert {change["key"]: (change["a"], change["b"]) for change in pair["outcome"]} == {
        "active-cast.failed": ("", "decode-eager"),
        "active-cast.result": ("pass", "fail"),
        "active-cast.scenarios.fail": ("-", "1"),
        "active-cast.scenarios.pass": ("1", "-"),
        "state": ("done", "failed"),
    }
    assert "verify: the set-ups are the same." in invoke("compare", "1", "2", "--db", db).stdout
    exported = [json.loads(line) for line in invoke("runs", "--export", "-", "--db", db).stdout.splitlines()]
    assert [(run["kind"], run["result"]["result"]) for run in exported] == [("verify", "pass"), ("verify", "fail")]
    assert invoke("report", "-o", tmp_path / "page.html", "--db", db).exit_code == 2, "nothing to draw"


def test_what_is_about_to_run_is_said_first(harness: dict[str, Any], install_tree: TreeFactory) -> None:
    site = install_tree("0.5.9")
    line = "running stock and patched code of SGLang 0.5.9 side by side on cpu"
    said: list[str] = []
    watch = Silent()
    watch.say = lambda line: said.append(line)  # type: ignore[method-assign]
    watch.begin = lambda title, total: said.append(f"{title}: {total}")  # type: ignore[method-assign]
    watch.step = lambda done: said.append(done)  # type: ignore[method-assign]
    verify(["active-cast"], scenarios=["decode-eager"], sglang=site, keep=False, watch=watch)
    assert said == [line, "scenarios of active-cast: 1", "decode-eager"]
    done = invoke("verify", "active-cast", "--sglang", site, "--no-keep")
    assert done.stderr.splitlines()[:2] == [line, f"scenarios of active-cast: {len(scenario_names())}"]
    assert line in done.stdout, "as it was"
    assert json.loads(invoke("verify", "active-cast", "--sglang", site, "--no-keep", "--json").stdout)


def test_what_differs_in_the_set_ups_of_two(harness: dict[str, Any], install_tree: TreeFactory, tmp_path: Path) -> None:
    db = tmp_path / "db"
    for release, fails in (("0.5.9", ()), ("0.5.15", ("active-cast",))):
        harness["fails"] = fails
        invoke("verify", "active-cast", "--sglang", install_tree(release), "--label", release, "--db", db)
    (pair,) = json.loads(invoke("compare", "0.5.9", "0.5.15", "--db", db, "--json").stdout)["pairs"]
    assert pair["comparable"]
    found = {change["key"]: (change["a"], change["b"]) for change in pair["setup"]}
    assert found["sglang"] == ("0.5.9", "0.5.15")
    assert set(found) <= {"sglang", "files.active-cast.stock", "files.active-cast.patched"}
    assert {"key": "active-cast.result", "a": "pass", "b": "fail"} in pair["outcome"], "a label finds a failing verify"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug of the harness")])
def test_a_verify_that_breaks_off_is_kept(
    harness: dict[str, Any], install_tree: TreeFactory, tmp_path: Path, error: BaseException
) -> None:
    site, db = install_tree("0.5.9"), tmp_path / "db"
    harness["raises"] = {"gather-cast": error}
    done = invoke("verify", "active-cast", "gather-cast", "--sglang", site, "--db", db)
    (run,) = kept(db)
    if isinstance(error, KeyboardInterrupt):
        assert (done.exit_code, run.state) == (130, "interrupted")
    else:
        assert (run.state, run.result["error"]) == ("failed", "ValueError: a bug of the harness")
        assert "a bug of the harness" in invoke("runs", "--db", db).stdout
    assert run.result["outcome"].keys() == {"active-cast"}, "what was found before"
    assert not run.decided


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["a device", "not a database", "another program's", "fails at the end"])
def test_a_store_that_cannot_be_written_changes_nothing(
    harness: dict[str, Any],
    install_tree: TreeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    fails: bool,
) -> None:
    site, db = install_tree("0.5.9"), tmp_path / "db"
    if how == "a device":
        db = Path("/dev/null/runs.sqlite3")
    elif how == "not a database":
        db.write_bytes(b"x" * 4096)
    elif how == "another program's":
        import sqlite3

        with sqlite3.connect(db) as other:
            other.execute("CREATE TABLE theirs (a)")
    else:

        def broken(*_: object, **__: object) -> None:
            raise OSError("stale file handle")

        monkeypatch.setattr(Store, "finish", broken)
    harness["fails"] = ("active-cast",) if fails else ()
    done = invoke("verify", "active-cast", "--sglang", site, "--db", db, "--json")
    assert done.exit_code == int(fails), done.output
    said = json.loads(done.stdout)
    assert (said["run"], said["patches"][0]["result"]) == (None, "fail" if fails else "pass")
    warnings = [line for line in done.stderr.splitlines() if "not kept as a run" in line]
    assert len(warnings) == 1, done.stderr


def test_what_is_not_to_be_kept_is_not(harness: dict[str, Any], install_tree: TreeFactory, tmp_path: Path) -> None:
    site, db = install_tree("0.5.9"), tmp_path / "new" / "db"
    done = invoke("verify", "active-cast", "--sglang", site, "--no-keep", "--db", db, "--json")
    assert (done.exit_code, json.loads(done.stdout)["run"], db.parent.exists()) == (0, None, False)
    assert invoke("verify", "no-such-patch", "--sglang", site, "--db", db).exit_code == 2
    assert not db.parent.exists(), "a command line that is refused is no run"


def test_no_test_writes_to_the_users_own_runs() -> None:
    assert "pytest" in str(default_path())


@pytest.mark.parametrize("verb", ["verify", "launch"])
def test_the_store_is_imported_only_where_a_run_is_kept(verb: str) -> None:
    heavy = {"sqlite3", "orjson", "platformdirs"}
    script = f"import sys, mlapatch.commands.{verb}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
