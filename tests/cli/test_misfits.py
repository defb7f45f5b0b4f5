"""A patch that does not fit: exit 3, nothing written, and a message that says where, what and what is nearest."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.cli.conftest import Site, SiteFactory
from tests.corpus import WITHOUT_CAST

CAST = re.compile(r"[\w.]+\.token_to_kv_pool\.get_key_buffer\(layer\.layer_id\)\.to\(\s*q\.dtype\s*\)")
EXTEND, DECODE = 0, 1
VERSIONS = ("0.5.9", "0.5.23")


def replace_cast(here: Site, which: int, new: Callable[[str], str]) -> int:
    """Change one of the two whole-pool casts by hand; its line."""
    text = here.bytes.decode()
    found = list(CAST.finditer(text))
    assert len(found) == 2
    start, end = found[which].span()
    here.backend.write_bytes((text[:start] + new(found[which][0]) + text[end:]).encode())
    return text.count("\n", 0, start) + 1


def refused(here: Site, patch: str, verdict: str, *parts: str) -> None:
    """Status and apply agree on the verdict, and apply writes nothing."""
    frozen = here.snapshot()
    status = here.ok("status", "--json")
    assert status.verdicts[patch] == verdict
    done = here("apply", patch)
    assert done.code == 3, done
    assert here.snapshot() == frozen
    assert f"error: {patch}: {verdict}: " in done.err
    for part in parts:
        assert part in done.err, done.err
        if not part.startswith("  "):
            assert part in status.reason(patch)


def line_of(here: Site, text: str) -> int:
    before, found, _ = here.bytes.decode().partition(text)
    assert found
    return before.count("\n") + 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", ["gather-cast", "active-cast"])
def test_an_anchor_that_was_removed(site: SiteFactory, version: str, patch: str) -> None:
    here = site(version)
    replace_cast(here, DECODE, lambda _: "None")
    refused(
        here,
        patch,
        "drifted",
        f"srt/layers/attention/flashinfer_mla_backend.py of SGLang {version}, FlashInferMLAAttnBackend.forward_decode",
        "expected 1 x {pool}.get_key_buffer({layer}.layer_id).to({dtype}), found 0",
        "  where: FlashInferMLAAttnBackend.forward_decode\n",
        "  expected: 1 x {pool}.get_key_buffer({layer}.layer_id).to({dtype})\n",
        "  found: 0",
        f"  next: mlapatch check {patch} --all-releases",
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_an_anchor_that_was_renamed_is_the_nearest_candidate(site: SiteFactory, version: str) -> None:
    here = site(version)
    line = replace_cast(here, EXTEND, lambda old: old.replace("get_key_buffer", "get_mla_buffer"))
    refused(
        here,
        "gather-cast",
        "drifted",
        "FlashInferMLAAttnBackend.forward_extend: expected 1 x",
        f"nearest candidate: line {line}: ",
        "get_mla_buffer(layer.layer_id).to(q.dtype)",
    )


def test_a_scope_that_was_renamed(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.edit("    def forward_decode(", "    def forward_decoding(")
    line = line_of(here, "    def forward_decoding(")
    refused(
        here,
        "active-cast",
        "drifted",
        "FlashInferMLAAttnBackend.forward_decode: expected",
        "found the scope is missing",
        f"nearest candidate: line {line}: FlashInferMLAAttnBackend.forward_decoding",
    )


def test_an_anchor_that_stands_twice(site: SiteFactory) -> None:
    here = site("0.5.23")
    replace_cast(here, EXTEND, lambda old: f"[{old}, {old}][0]")
    for patch in ("gather-cast", "active-cast"):
        refused(here, patch, "ambiguous", "FlashInferMLAAttnBackend.forward_extend: expected 1 x", "found 2")


def test_a_method_that_is_defined_twice(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.edit("    def forward_decode(", "    def forward_decode(self):\n        pass\n\n    def forward_decode(")
    refused(here, "gather-cast", "ambiguous", "FlashInferMLAAttnBackend.forward_decode: expected 1 x", "found 2")


def test_a_file_that_is_gone(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.backend.unlink()
    status = here.ok("status", "--json")
    assert status.verdicts["gather-cast"] == "drifted"
    assert "srt/layers/attention/flashinfer_mla_backend.py is not in this SGLang" in status.reason("gather-cast")
    for verb in ("apply", "diff"):
        assert here(verb, "gather-cast").code == 3


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (b"def broken(:\n", "not Python"),
        (b"print 'Python 2'\n", "not Python"),
        (b"x = '\xff'\n", "cannot be decoded"),
        (b"x = 1\0\n", "not Python"),
    ],
)
def test_a_file_that_is_not_python_3(site: SiteFactory, damage: bytes, what: str) -> None:
    here = site("0.5.9")
    here.backend.write_bytes(here.bytes + damage)
    refused(here, "gather-cast", "drifted", what)


@pytest.mark.parametrize("version", WITHOUT_CAST[-1:])
def test_a_release_without_the_cast_is_unsupported(site: SiteFactory, version: str) -> None:
    here = site(version)
    frozen = here.snapshot()
    status = here.ok("status", "--json")
    for patch in ("gather-cast", "active-cast", "fp8-plan"):
        assert status.verdicts[patch] == "unsupported"
        done = here("apply", patch, "--sm", "90")
        assert done.code == 5
        assert "before" in done.err
    forced = here("apply", "gather-cast", "--force")
    assert forced.code == 3, "the structure still decides"
    assert here.snapshot() == frozen
