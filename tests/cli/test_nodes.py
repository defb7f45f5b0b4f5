"""Equal nodes have equal digests, and `status --expect` names what differs between two that are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Command, Done, Site, SiteFactory, process
from tests.conftest import TreeFactory
from tests.corpus import BACKEND, Corpus

TARGET = BACKEND.removeprefix("sglang/")


def digest(here: Site, *arguments: str) -> str:
    return str(here.ok("status", "--json", *arguments).json["digest"])


def report(here: Site, file: Path) -> Path:
    file.write_text(here.ok("status", "--json").out)
    return file


def expected(done: Done) -> dict[str, object]:
    found = done.json["expected"]
    assert isinstance(found, dict)
    return found


def test_a_digest_depends_on_bytes_only(install_tree: TreeFactory, mlapatch_: Command, tmp_path: Path) -> None:
    """Not on the path, the time, the order of applying, the kind of install, the version's spelling or the state."""
    one = Site(install_tree("0.5.9"), mlapatch_)
    one.ok("apply", "gather-cast")
    one.ok("apply", "profile-decode")
    two = Site(install_tree("0.5.9").rename(tmp_path / "elsewhere with a space"), mlapatch_)
    two.ok("apply", "profile-decode", "gather-cast")
    shutil.rmtree(two.folder / ".mlapatch")
    checkout = Site(tmp_path / "checkout" / "python", mlapatch_)
    shutil.copytree(one.folder / "sglang", checkout.folder / "sglang")
    (checkout.folder / "sglang" / "_version.py").unlink(missing_ok=True)
    (checkout.folder / "sglang" / "version.py").write_text('__version__ = "0.5.9+ours"\n')
    assert two.ok("status", "--json").verdicts["gather-cast"] == "applied"
    assert digest(one) == digest(two) == digest(checkout)
    assert digest(one) == digest(one, "--gpu", "h200") == digest(one, "--sm", "120")


def test_a_digest_is_the_same_for_another_user_and_time(install_tree: TreeFactory, tmp_path: Path) -> None:
    site = install_tree("0.5.9")
    digests = set()
    for number, zone in enumerate(("UTC", "Asia/Tokyo")):
        env = {"HOME": str(tmp_path / str(number)), "TZ": zone, "LC_ALL": "C", "MLAPATCH_CACHE": str(tmp_path / zone)}
        digests.add(process("status", "--json", "--sglang", site, env=env).json["digest"])
    assert len(digests) == 1


def test_each_file_and_each_patch_counts(site: SiteFactory) -> None:
    here = site("0.5.9")
    seen = [digest(here)]
    for names in (("active-cast",), ("active-cast", "profile-decode")):
        here.ok("apply", *names)
        seen.append(digest(here))
    here.edit("import torch\n", "import torch  # ours\n")
    seen.append(digest(here))
    assert len(set(seen)) == 4
    here.edit("import torch  # ours\n", "import torch\n")
    here.ok("revert")
    assert digest(here) == seen[0]


@pytest.mark.parametrize("how", ["digest", "file", "a file with the digest"])
def test_the_expected_digest_is_no_finding(site: SiteFactory, tmp_path: Path, how: str) -> None:
    one, two = site("0.5.9"), site("0.5.9")
    for here in (one, two):
        here.ok("apply", "active-cast")
    file = report(one, tmp_path / "node.json")
    if how == "a file with the digest":
        file.write_text(digest(one) + "\n")
    done = two.ok("status", "--json", "--expect", digest(one) if how == "digest" else file)
    assert expected(done) == {"digest": digest(one), "equal": True, "difference": [], "next": "", "notes": []}
    assert "the digest is the expected one" in two.ok("status", "--expect", digest(one)).out


#: Patches on the node that is asked, patches on the other, the way from the one to the other.
PAIRS = [
    ((), ("active-cast",), "mlapatch apply active-cast"),
    (("active-cast",), (), "mlapatch revert active-cast"),
    (("gather-cast",), ("active-cast",), "mlapatch revert gather-cast && mlapatch apply active-cast"),
    (("active-cast",), ("active-cast", "profile-decode"), "mlapatch apply profile-decode"),
]


@pytest.mark.parametrize(("mine", "theirs", "way"), PAIRS, ids=lambda pair: "+".join(pair) if pair else "none")
def test_a_digest_alone_names_the_patches_that_differ(
    site: SiteFactory, mine: tuple[str, ...], theirs: tuple[str, ...], way: str
) -> None:
    one, two = site("0.5.9"), site("0.5.9")
    for here, names in ((one, mine), (two, theirs)):
        if names:
            here.ok("apply", *names)
    frozen = one.snapshot()
    done = one("status", "--json", "--expect", digest(two))
    assert done.code == 1
    told = expected(done)
    assert told["equal"] is False
    assert told["next"] == way
    assert one.snapshot() == frozen, "nothing is written"
    for part in way.split(" && "):
        one.ok(*part.split()[1:])
    assert one.ok("status", "--expect", digest(two)).code == 0


def test_the_text_names_file_patch_and_next_command(site: SiteFactory) -> None:
    one, two = site("0.5.9"), site("0.5.9")
    two.ok("apply", "active-cast")
    done = one("status", "--expect", digest(two))
    assert done.code == 1
    assert f"not the expected digest: {digest(one)} here, {digest(two)} expected" in done.out
    assert f"{TARGET}: without patches here, with active-cast expected" in done.out
    assert "  next: mlapatch apply active-cast" in done.out


def test_another_release_is_named_by_its_report_only(site: SiteFactory, tmp_path: Path) -> None:
    one, two = site("0.5.9"), site("0.5.23")
    by_digest = one("status", "--json", "--expect", digest(two))
    assert by_digest.code == 1
    assert "no state that mlapatch can make of this SGLang" in str(expected(by_digest)["difference"])
    assert "--expect node.json" in str(expected(by_digest)["next"])
    by_report = one("status", "--json", "--expect", report(two, tmp_path / "node.json"))
    assert by_report.code == 1
    assert any(line.startswith(f"{TARGET}: sha256 {one.sha256[:16]}") for line in expected(by_report)["difference"])  # type: ignore[attr-defined]
    assert "SGLang is 0.5.9 here and 0.5.23 there" in expected(by_report)["notes"]  # type: ignore[operator]
    assert "SGLang is 0.5.9 here and 0.5.23 there" in by_report.err


def test_a_report_names_a_local_edit(site: SiteFactory, tmp_path: Path) -> None:
    one, two = site("0.5.9"), site("0.5.9")
    for here in (one, two):
        here.ok("apply", "active-cast")
    two.edit("import torch\n", "import torch  # ours\n")
    done = one("status", "--json", "--expect", report(two, tmp_path / "node.json"))
    assert done.code == 1
    assert [str(line).split(":")[0] for line in expected(done)["difference"]] == [TARGET]  # type: ignore[attr-defined]
    alone = two("status", "--json", "--expect", digest(one))
    assert f"{TARGET} is edited here" in str(expected(alone)["difference"])


def test_an_edited_node_is_told_from_a_pristine_one(site: SiteFactory) -> None:
    one, two = site("0.5.9"), site("0.5.9")
    two.edit("import torch\n", "import torch  # ours\n")
    done = two("status", "--json", "--expect", digest(one))
    assert f"{TARGET}: without patches and local edits here, pristine expected" not in str(done.json)
    assert expected(done)["difference"] == [f"{TARGET}: without patches, with local edits here, pristine expected"]
    assert expected(done)["next"] == "mlapatch guard check"


def test_a_patch_without_its_state_needs_no_network(site: SiteFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = site("0.5.9"), site("0.5.9")
    one.ok("apply", "active-cast")
    shutil.rmtree(one.folder / ".mlapatch")
    monkeypatch.setattr("mlapatch.install.original.original_bytes", lambda *_: pytest.fail("asked for the original"))
    done = one("status", "--json", "--expect", digest(two))
    assert expected(done)["next"] == "mlapatch revert active-cast", "RECORD knows the pristine bytes' sha256"


def test_both_require_and_expect_are_judged(site: SiteFactory) -> None:
    here = site("0.5.9")
    done = here("status", "--require", "active-cast", "--expect", digest(here))
    assert done.code == 1
    assert "the digest is the expected one" in done.out
    assert "required and not applied" in done.out


def test_standard_input(install_tree: TreeFactory) -> None:
    """`ssh node0 mlapatch status --json | mlapatch status --expect -`."""
    import subprocess
    import sys

    site = install_tree("0.5.9")
    there = process("status", "--json", "--sglang", site)
    command = [sys.executable, "-m", "mlapatch", "status", "--expect", "-", "--sglang", str(site)]
    done = subprocess.run(command, input=there.out, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


BAD = ["", "deadbeef", "[]", "{}", '{"digest": 1}', '{"digest": "x"}', "not json", "[" * 100_000, "\x00"]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_is_no_report_is_a_usage_error(site: SiteFactory, tmp_path: Path, text: str) -> None:
    file = tmp_path / "node.json"
    file.write_text(text)
    done = site("0.5.9")("status", "--json", "--expect", file)
    assert done.code == 2
    assert done.json["error"]["next"].startswith("mlapatch status --json")


@pytest.mark.parametrize("text", ["deadbeef", "/no/such/file", "a\0b"])
def test_neither_a_digest_nor_a_file(site: SiteFactory, text: str) -> None:
    assert site("0.5.9")("status", "--expect", text).code == 2


def test_a_report_of_half_the_form(site: SiteFactory, tmp_path: Path, corpus: Corpus) -> None:
    here = site("0.5.9")
    whole = here.ok("status", "--json").json
    for key in ("sglang", "targets", "patches"):
        (tmp_path / "node.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        assert here("status", "--expect", tmp_path / "node.json").code == 2
