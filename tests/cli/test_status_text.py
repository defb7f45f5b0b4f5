"""What `status` prints for people: short where much is the same."""

from __future__ import annotations

from tests.cli.conftest import SiteFactory


def test_patches_that_one_applied_patch_excludes_share_a_line(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.ok("apply", "active-cast")
    lines = [line for line in here.ok("status").out.splitlines() if "conflicts" in line]
    words = "verdict: conflicts  reason: excluded by active-cast, which is applied"
    assert lines == [f"patch: fp8-plan, fused-decode, gather-cast  {words}"]
    verdicts = here.verdicts()
    assert [name for name, verdict in verdicts.items() if verdict == "conflicts"] == [
        "fp8-plan",
        "fused-decode",
        "gather-cast",
    ], "one each for programs"


def test_other_verdicts_have_a_line_each(site: SiteFactory) -> None:
    lines = [line for line in site("0.5.9").ok("status").out.splitlines() if line.startswith("patch: ")]
    assert len(lines) == 5
