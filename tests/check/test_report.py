"""The words of the compat table, and `--verify` over many releases (with the running itself stubbed)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.cli.drawn import Drawn
from mlapatch.commands.check import check
from mlapatch.compat import Row, Subject, pinned_flashinfer
from mlapatch.compat_report import blocks
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome, Text

NAMES = ("0.5.7", "0.5.8", "0.5.9", "0.5.10", "0.5.11")


def rows(*verdicts: tuple[Verdict, str]) -> list[Row]:
    made = []
    for name, (verdict, reason) in zip(NAMES, verdicts, strict=True):
        made.append(Row(Subject(name, Version(name), {}), "ab", [Judgement("active-cast", verdict, reason)]))
    return made


def reasons(made: Sequence[Row]) -> list[str]:
    patch = load_catalogue().get("active-cast")
    return [line for block in blocks(made, [patch], (90,)) if isinstance(block, Text) for line in block.lines]


def test_each_reason_is_told_once_with_its_releases() -> None:
    fits, drift = (Verdict.APPLICABLE, "every edit fits"), (Verdict.DRIFTED, "line {} moved")
    same = [(drift[0], drift[1].format(n)) for n in range(4)]
    assert reasons(rows(fits, fits, fits, fits, fits)) == []
    assert reasons(rows(same[0], fits, fits, fits, fits)) == ["active-cast on 0.5.7: drifted: line 0 moved"]
    assert reasons(rows(same[0], same[1], fits, same[2], same[3])) == [
        "active-cast on 0.5.7 to 0.5.8, 0.5.10 to 0.5.11 (4 releases): drifted: line 0 to 3 moved"
    ]
    other = (Verdict.AMBIGUOUS, "twice")
    assert reasons(rows(fits, same[0], fits, other, other)) == [
        "active-cast on 0.5.8: drifted: line 0 moved",
        "active-cast on 0.5.10 to 0.5.11 (2 releases): ambiguous: twice",
    ]


def test_a_reason_for_many_releases_spans_the_numbers_that_differ() -> None:
    """Not one release's pin, as if the others had it too."""
    text = "needs flashinfer >=0.6.14, and flashinfer {} is pinned"
    made = [(Verdict.UNSUPPORTED, text.format(pin)) for pin in ("0.2.5", "0.5.0", "0.6.3.post1", "0.6.12", "0.6.12")]
    told = reasons(rows(*made))
    assert len(told) == 1
    assert told[0].endswith("needs flashinfer >=0.6.14, and flashinfer 0.2.5 to 0.6.12 is pinned")
    assert reasons(rows(*[(Verdict.DRIFTED, "on 0.1 and 0.1")] * 5))[0].endswith("on 0.1 and 0.1")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["torch==2.9.1", "flashinfer_python==0.6.3"], "0.6.3"),
        (['flashinfer_python==0.2.5; extra == "srt"'], "0.2.5"),
        (["flashinfer_python[cu13]==0.7.2"], "0.7.2"),
        (["flashinfer-cubin==0.6.3", "not a requirement ==", "flashinfer_python>=0.6"], None),
        ([], None),
    ],
)
def test_pinned_flashinfer(lines: list[str], expected: str | None) -> None:
    found = pinned_flashinfer(lines)
    assert (str(found.version) if found else None) == expected


def test_verify_runs_once_for_each_content(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def verify(names: Sequence[str], *, sglang: Path, patches: Sequence[Path] | None, keep: bool) -> Outcome:
        assert not keep, "a check is no run of verify's"
        version = next(sglang.glob("sglang-*.dist-info")).name.removesuffix(".dist-info").split("-")[1]
        ran.append((names[0], version))
        failed = ["decode"] if version == "0.5.12.post1" else []
        data: dict[str, object] = {"patches": [{"scenarios": [1, 2], "failed": failed}]}
        return Outcome(Exit.FOUND if failed else Exit.OK, data)

    monkeypatch.setattr("mlapatch.commands.verify.verify", verify)
    outcome = check(["active-cast"], releases=["0.4.6.post5", "0.5.9", "0.5.12.post1"], verify=True)
    assert ran == [("active-cast", "0.4.6.post5"), ("active-cast", "0.5.12.post1")]
    assert outcome.exit is Exit.FOUND
    verified: Any = outcome.data["verified"]
    assert [item["result"] for item in verified] == ["pass", "fail"]
    ran.clear()
    assert check(["active-cast"], releases=["0.4.6.post5"], verify=True).exit is Exit.OK


def test_verify_without_torch_is_an_environment_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*_: object, **__: object) -> Outcome:
        raise MlapatchError(Exit.ENVIRONMENT, "verify needs torch")

    monkeypatch.setattr("mlapatch.commands.verify.verify", verify)
    with pytest.raises(MlapatchError, match="needs torch"):
        check(["active-cast"], releases=["0.4.6.post5"], verify=True)


def test_progress_in_a_pipe_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlapatch.cli.drawn._SECONDS_BETWEEN_LINES", 0)
    with Drawn() as watch:
        watch.begin("fetching", 2)
        watch.transfer("sglang 0.5.9", 10, 100)
        watch.step("sglang 0.5.9")
        watch.step("sglang 0.5.10")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "fetching: 2",
        "fetching: 1 of 2 (sglang 0.5.9)",
        "fetching: 2 of 2 (sglang 0.5.10)",
    ]
    assert captured.out == ""


def test_progress_on_a_terminal_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Drawn() as watch:
        watch.begin("fetching", 1)
        watch.transfer("sglang 0.5.9", 10, None)
        watch.transfer("sglang 0.5.9", 120, 100)  # the announced size is rounded
        watch.step("sglang 0.5.9")
        watch.begin("judging", 1)
        watch.step("active-cast on 0.5.9")
        assert watch._bars is not None
    assert watch._bars is None
