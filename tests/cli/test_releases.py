"""Apply, status, apply again, revert: the main promise, on every release that the patches were written for."""

from __future__ import annotations

import json

import pytest

from tests.cli import oracle
from tests.cli.conftest import SiteFactory, contents, process
from tests.corpus import BACKEND, RELEASES, Corpus

PATCHES = ("gather-cast", "active-cast", "fp8-plan")
#: The newest of them pins a flashinfer that fp8-plan accepts.
FORCED = [release for release in RELEASES if release != "0.5.23"]


def arguments(patch: str, version: str) -> list[str]:
    if patch != "fp8-plan":
        return [patch]
    return [patch, "--sm", "90", *(["--force"] if version in FORCED else [])]


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("version", RELEASES)
def test_apply_status_apply_revert(site: SiteFactory, corpus: Corpus, version: str, patch: str) -> None:
    here = site(version)
    before, files = here.bytes, contents(here.folder)
    assert before == corpus.text(version)
    assert len(oracle.whole_pool_casts(before)) == 2

    here.ok("apply", *arguments(patch, version))
    after = here.bytes
    compile(after, str(here.backend), "exec", dont_inherit=True)
    assert oracle.whole_pool_casts(after) == []
    assert oracle.trespasses(before, after, patch) == []
    for untouched in ("FlashInferMhaChunkKVRunner", "ragged", "dcp"):
        assert oracle.segments(after, untouched) == oracle.segments(before, untouched), untouched
    assert {path for path, digest in contents(here.folder).items() if files.get(path) != digest} == {BACKEND}

    status = here.ok("status", "--json").json
    assert {p["name"]: p["verdict"] for p in status["patches"]}[patch] == "applied"
    assert [target for target in status["targets"] if target["state"] != "pristine"] == [
        {"path": BACKEND.removeprefix("sglang/"), "sha256": here.sha256, "state": "patched", "changed_inside": 0}
    ]
    assert status["sglang"]["version"] == version
    assert status["sglang"]["install"] == "wheel"

    frozen = here.snapshot()
    again = here.ok("apply", *arguments(patch, version))
    assert here.snapshot() == frozen
    assert f"{patch}: already applied, nothing to do" in again.out

    reverted = here.ok("revert")
    assert here.bytes == before
    assert contents(here.folder) == files
    assert "byte-identical to the release" in reverted.out
    assert here.verdicts()["gather-cast"] == "applicable"


@pytest.mark.parametrize("version", RELEASES)
def test_what_must_stay_is_in_the_file(corpus: Corpus, version: str) -> None:
    """The comparisons above compare something."""
    text = corpus.text(version)
    assert oracle.segments(text, "ragged")
    assert bool(oracle.segments(text, "dcp")) is (version in {"0.5.15.post1", "0.5.23"})
    assert bool(oracle.segments(text, "FlashInferMhaChunkKVRunner")) is (version != "0.4.6.post5")


def test_an_oracle_that_sees_trespasses(corpus: Corpus) -> None:
    before = corpus.text("0.5.9")
    for old, new in (
        ("import torch\n", "import torch\nimport os\n"),
        ("def get_cuda_graph_seq_len_fill_value(self):", "def get_cuda_graph_seq_len_fill_value( self):"),
        ("    def init_forward_metadata(", "    left = 1\n\n    def init_forward_metadata("),
        ("        self.data_type = model_runner.dtype\n", ""),
    ):
        damage = before.replace(old.encode(), new.encode(), 1)
        assert damage != before
        assert oracle.trespasses(before, damage, "gather-cast"), damage[:80]


def test_the_same_from_a_shell(site: SiteFactory) -> None:
    here = site("0.5.9")
    before = here.sha256
    for verb, *rest in (("apply", "active-cast"), ("status", "--require", "active-cast"), ("apply", "active-cast")):
        done = process(verb, *rest, env={"MLAPATCH_SGLANG": str(here.folder)})
        assert (done.code, done.err) == (0, ""), done
    status = process("status", "--json", env={"MLAPATCH_SGLANG": str(here.folder / "sglang")})
    expected = {"active-cast": "applied", "fp8-plan": "conflicts", "gather-cast": "conflicts"}
    assert {name: status.verdicts[name] for name in expected} == expected
    assert process("revert", "--json", "--sglang", here.folder).json["reverted"] == ["active-cast"]
    assert here.sha256 == before
    required = process("status", "--require", "active-cast", "gather-cast", "--sglang", here.folder)
    assert required.code == 1
    assert "required and not applied: active-cast (applicable: every edit fits), gather-cast (" in required.out


def test_a_dry_run_shows_the_diff_and_writes_nothing(site: SiteFactory) -> None:
    here = site("0.5.23")
    frozen = here.snapshot()
    shown = here.ok("apply", "gather-cast", "--dry-run")
    assert here.snapshot() == frozen
    assert "+++ b/sglang/srt/layers/attention/flashinfer_mla_backend.py" in shown.out
    diff = here.ok("diff", "gather-cast", "--json").json["diff"]
    assert diff.strip() in shown.out
    here.ok("apply", "gather-cast")
    frozen = here.snapshot()
    assert here.ok("diff", "gather-cast", "--json").json["diff"] == diff, "the same before and after"
    assert "would be reverted" in here.ok("revert", "--dry-run").out
    assert here.snapshot() == frozen


def test_the_diff_is_one_that_git_applies(site: SiteFactory) -> None:
    import subprocess

    here = site("0.5.15.post1")
    diff = here.ok("diff", "gather-cast").out
    command = ["git", "apply", "--verbose", "-"]
    subprocess.run(command, input=diff.encode(), cwd=here.folder, check=True, capture_output=True)
    by_git = here.bytes
    assert here.verdicts()["gather-cast"] == "applied", "the verdict comes from the bytes, not from the journal"
    subprocess.run([*command, "-R"], input=diff.encode(), cwd=here.folder, check=True, capture_output=True)
    here.ok("apply", "gather-cast")
    assert here.bytes == by_git


def test_equal_nodes_have_equal_digests(site: SiteFactory) -> None:
    one, two = site("0.5.9"), site("0.5.9")
    digests = []
    for here in (one, two):
        here.ok("apply", "gather-cast")
        digests.append(here.ok("status", "--json").json["digest"])
    assert digests[0] == digests[1]
    two.ok("revert")
    assert two.ok("status", "--json").json["digest"] != digests[0]


def test_list_names_every_patch(site: SiteFactory) -> None:
    listed = site("0.5.9").run("list", "--json").json
    assert {patch["name"] for patch in listed["patches"]} >= set(PATCHES)
    assert json.dumps(listed)
