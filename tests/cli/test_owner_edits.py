"""Edits of the file's owner, from before and after apply: kept to the byte, or refused with both sides shown."""

from __future__ import annotations

import shutil

from tests.cli.conftest import Site, SiteFactory
from tests.cli.test_composition import FROM

#: An earlier edit for another GPU, in the same file as the patches and in the methods that they edit.
SM120 = {
    "from sglang.srt.utils import": "# local: SM120\nfrom sglang.srt.utils import",
    "        cache_loc = forward_batch.out_cache_loc\n": (
        '        cache_loc = forward_batch.out_cache_loc\n        moe_backend = "flashinfer_cutlass"  # SM120\n'
    ),
    "class FlashInferMLAMultiStepDraftBackend": "SM120_ONLY = True\n\n\nclass FlashInferMLAMultiStepDraftBackend",
}
FILL = "        return 1\n"


def edit_for_sm120(here: Site) -> None:
    for old, new in SM120.items():
        here.edit(old, new)


def test_a_file_that_was_edited_before(site: SiteFactory) -> None:
    here = site("0.5.9")
    edit_for_sm120(here)
    edited = here.bytes
    assert states(here) == "edited"
    here.ok("apply", "gather-cast")
    assert all(new.encode() in here.bytes for new in SM120.values())
    assert here.verdicts()["gather-cast"] == "applied"
    assert states(here) == "edited", "patched, and not by mlapatch alone"
    done = here.ok("revert")
    assert here.bytes == edited
    assert "byte-identical to the file before mlapatch" in done.out


def states(here: Site) -> str:
    targets = here.ok("status", "--json").json["targets"]
    return str(next(t["state"] for t in targets if t["path"].endswith("flashinfer_mla_backend.py")))


def test_edits_made_after_apply_are_kept_by_revert(site: SiteFactory) -> None:
    here = site("0.5.9")
    original = here.bytes.decode()
    here.ok("apply", "gather-cast")
    edit_for_sm120(here)
    assert here.verdicts()["gather-cast"] == "applied"
    done = here.ok("revert")
    assert "your other edits are kept" in done.out
    for old, new in SM120.items():
        original = original.replace(old, new, 1)
    assert here.bytes.decode() == original


def test_edits_made_after_apply_are_kept_by_other_patches(site: SiteFactory) -> None:
    here = site("0.5.23")
    original = here.bytes.decode()
    here.ok("apply", "gather-cast", *FROM)
    here.edit("class FlashInferMLAMultiStepDraftBackend", SM120["class FlashInferMLAMultiStepDraftBackend"])
    here.ok("apply", "note-fill", *FROM)
    assert b"SM120_ONLY" in here.bytes
    here.ok("revert", "gather-cast", *FROM)
    assert b"SM120_ONLY" in here.bytes
    verdicts = here.verdicts(*FROM)
    assert (verdicts["gather-cast"], verdicts["note-fill"]) == ("applicable", "applied")
    here.ok("revert", *FROM)
    old = "class FlashInferMLAMultiStepDraftBackend"
    assert here.bytes.decode() == original.replace(old, SM120[old], 1)


def test_a_conflict_shows_both_sides_and_changes_nothing(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.ok("apply", "active-cast", *FROM)
    here.edit("k_buffer = active_cast(", "k_buffer = 1.0 * active_cast(")
    here.edit("self.stock_cast_reason = stock_cast_reason(", "self.other_reason = stock_cast_reason(")
    frozen = here.snapshot()
    for verb in (("revert",), ("revert", "active-cast"), ("apply", "note-fill"), ("diff", "active-cast")):
        done = here(*verb, *FROM)
        assert done.code == 4, done
        assert here.snapshot() == frozen
    done = here("revert", *FROM)
    assert "lines inside the edits of active-cast were changed by hand; nothing was written" in done.err
    assert "found: 2 conflict(s)" in done.err
    yours, mine = done.err.split("<<<<<<< your file, from line ")[2].split(">>>>>>> mlapatch")[0].split("=======\n")
    assert "k_buffer = 1.0 * active_cast(" in yours
    assert "k_buffer = forward_batch.token_to_kv_pool.get_key_buffer(" in mine
    assert "next: undo what stands under 'your file' at those lines" in done.err
    here.edit("k_buffer = 1.0 * active_cast(", "k_buffer = active_cast(")
    here.edit("self.other_reason = stock", "self.stock_cast_reason = stock")
    here.ok("revert", *FROM)


def test_a_comment_inside_the_edits_is_said_before_revert_refuses(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.ok("apply", "active-cast")
    assert "changed by hand" not in here.ok("status").out
    applied = here.bytes
    here.edit("            decode=True,", "            decode=True,  # mine")
    done = here.ok("status", "--require", "active-cast")
    told = "lines inside the edits of active-cast were changed by hand in 1 place(s) of srt/layers/attention/"
    assert told in done.out
    assert "mlapatch revert --dry-run shows the lines" in done.out
    files = {one["path"]: one["changed_inside"] for one in here.ok("status", "--json").json["targets"]}
    assert sorted(files.values()) == [0, 1]
    assert here("revert").code == 4
    here.backend.write_bytes(applied + b"# at the end\n")
    assert "changed by hand" not in here.ok("status").out
    here.ok("revert")


def test_what_never_writes_does_not_say_that_nothing_was_written(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.ok("apply", "active-cast")
    here.edit("            decode=True,", "            decode=True,  # mine")
    for verb in (("diff", "active-cast"), ("guard", "check", "--json"), ("status",)):
        done = here.run(*verb, "--sglang", here.folder)
        assert "changed by hand" in done.out + done.err
        assert "nothing was written" not in done.out + done.err
    assert "were changed by hand; nothing was written" in here("revert").err


def test_code_changed_inside_the_edits_is_edited(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.ok("apply", "active-cast")
    applied = here.bytes.decode()
    changes = {
        "a helper's body": ("    if pool.dtype == dtype:\n        return pool\n", ""),
        "a helper that is gone": ("def active_cast(", "def active_cast_no_more("),
        "a constant": ("cast_workspaces = {}", "cast_workspaces = dict()"),
        "an argument": ("decode=True,", "decode=False,"),
        "an inserted statement": ("self.stock_cast_reason = stock_cast_reason(", "self.reason = stock_cast_reason("),
        "the log line": ('"mlapatch: active-cast active in', '"mlapatch: something active in'),
    }
    for what, (old, new) in changes.items():
        assert old in applied, what
        here.backend.write_bytes(applied.replace(old, new, 1).encode())
        status = here.ok("status", "--json")
        assert status.verdicts["active-cast"] == "edited", what
        assert status.reason("active-cast").startswith("code inside the patch's own edits was changed: in ")
        frozen = here.snapshot()
        done = here("apply", "active-cast", "--force")
        assert (done.code, "active-cast: edited: " in done.err) == (4, True), "--force never overrides it"
        assert here.snapshot() == frozen
        assert here("status", "--require", "active-cast").code == 1
        assert status.reason("gather-cast") == "excluded by active-cast, which is edited"


def test_edited_code_without_the_state(site: SiteFactory) -> None:
    here = site("0.5.9")
    before = here.bytes
    here.ok("apply", "active-cast")
    applied = here.bytes
    shutil.rmtree(here.folder / ".mlapatch")
    here.edit("decode=True,", "decode=False,")
    status = here.ok("status", "--json")
    assert status.verdicts["active-cast"] == "edited"
    done = here("revert")
    assert (done.code, "lines inside the edits of active-cast were changed by hand" in done.err) == (4, True)
    here.backend.write_bytes(applied)
    here.ok("revert")
    assert here.bytes == before


def test_comments_and_white_space_inside_the_edits_are_not(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.ok("apply", "active-cast")
    here.edit("cast_workspaces = {}", "cast_workspaces = {  }  # one a shape")
    here.edit("k_buffer = active_cast(", "# the active slots only\n        k_buffer = active_cast(")
    here.edit("decode=True,\n", "decode=True,  # not a prefill\n")
    here.edit(
        "    if pool.dtype == dtype:\n        return pool\n", "    if pool.dtype == dtype:\n\n        return pool\n"
    )
    assert here.verdicts()["active-cast"] == "applied"
    assert here("status", "--require", "active-cast").code == 0
    frozen = here.snapshot()
    assert "already applied" in here.ok("apply", "active-cast").out
    assert here.snapshot() == frozen


def test_the_file_is_edited_between_two_applies(site: SiteFactory) -> None:
    """The edit becomes part of what revert gives back, wherever it was made."""
    here = site("0.5.9")
    original = here.bytes.decode()
    here.ok("apply", "note-fill", *FROM)
    here.edit(FILL, "        return 1  # at least\n")
    here.ok("revert", *FROM)
    assert here.bytes.decode() == original.replace(FILL, "        return 1  # at least\n", 1)


def test_a_patched_file_that_was_broken_by_hand(site: SiteFactory) -> None:
    """Nothing can be told from its structure, so the state is believed and nothing is forgotten."""
    here = site("0.5.9")
    before = here.bytes
    here.ok("apply", "gather-cast")
    here.backend.write_bytes(here.bytes + b"\ndef broken(:\n")
    status = here.ok("status", "--json")
    assert status.verdicts["gather-cast"] == "drifted"
    assert "not Python" in status.reason("gather-cast")
    here.ok("revert")
    # The end of the file is where the patch's log line was: the user's line stays, and the patch is out.
    assert here.bytes == before + b"\ndef broken(:\n"
