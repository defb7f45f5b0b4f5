"""A patch that does not fit: exit 3, nothing written, and a message that says where, what and what is nearest."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command, Site, SiteFactory
from tests.corpus import BACKEND, WITHOUT_CAST

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
        "  next: mlapatch guard check shows your edits of the file",
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


def install_with(here: Site, kind: str) -> None:
    """`wheel`: RECORD tells what the file was. `checkout`: git does."""
    if kind == "checkout":
        for dist_info in here.folder.glob("*.dist-info"):
            shutil.rmtree(dist_info)
        for step in (("init", "-q"), ("add", "."), ("commit", "-qm", "as it came")):
            subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *step], cwd=here.folder, check=True)


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_an_edit_of_ones_own_is_not_blamed_on_the_release(site: SiteFactory, kind: str) -> None:
    here = site("0.5.9")
    install_with(here, kind)
    line = replace_cast(here, EXTEND, lambda old: old.replace("get_key_buffer", "get_my_key_buffer"))
    how = "--release 0.5.9" if kind == "wheel" else f"--ref HEAD --sglang {here.folder / 'sglang'}"
    after = f"shows your edits of the file; whether it fits without them: mlapatch check active-cast {how}\n"
    refused(
        here,
        "active-cast",
        "drifted",
        "the file is edited here (it is not as it came)",
        f"nearest candidate: line {line}",
    )
    for verb in ("apply", "diff", "verify"):
        done = here(verb, "active-cast")
        assert done.code == 3
        assert done.err.splitlines(keepends=True)[-1].endswith(after), done.err
        assert "report" not in done.err
    auto = here("apply", "auto", "--sm", "90")
    assert auto.code == 3
    assert auto.err.endswith(after)
    assert "active-cast, gather-cast, fp8-plan, fused-decode: drifted: " in auto.err
    assert auto.err.count("nearest candidate") == 1
    judged = next(p for p in here.ok("status", "--json").json["patches"] if p["name"] == "active-cast")
    assert "guard check" in judged["next"]


def test_a_release_that_a_patch_does_not_fit_is_blamed(site: SiteFactory) -> None:
    here = site("0.5.9")
    line = replace_cast(here, EXTEND, lambda old: old.replace("get_key_buffer", "get_my_key_buffer"))
    record = next(here.folder.glob("*.dist-info")) / "RECORD"
    digest = base64.urlsafe_b64encode(hashlib.sha256(here.bytes).digest()).rstrip(b"=").decode()
    told = re.sub(rf"(?m)^({re.escape(BACKEND)}),[^,]*,.*$", rf"\1,sha256={digest},", record.read_text())
    record.write_text(told)
    refused(
        here, "active-cast", "drifted", f"nearest candidate: line {line}", "  next: mlapatch check active-cast --all"
    )
    assert "edited here" not in here("apply", "active-cast").err


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_a_target_that_is_gone_is_to_be_put_back(site: SiteFactory, kind: str) -> None:
    here = site("0.5.9")
    install_with(here, kind)
    here.backend.unlink()
    how = (
        "pip install --force-reinstall --no-deps sglang==0.5.9"
        if kind == "wheel"
        else f"git -C {here.folder} checkout HEAD -- {here.backend}"
    )
    for verb in ("apply", "diff", "verify"):
        done = here(verb, "active-cast")
        assert done.code == 3, done
        told = "its RECORD lists it" if kind == "wheel" else "HEAD has it"
        assert f"flashinfer_mla_backend.py is not in this SGLang, though {told}" in done.err
        assert f"  next: put it back: {how}" in done.err


def test_an_empty_package_is_no_whole_sglang(mlapatch_: Command, tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    done = mlapatch_("apply", "active-cast", "--sglang", tmp_path)
    assert done.code == 3
    assert "this is no whole SGLang" in done.err
    assert "  next: install SGLang anew, or name another: mlapatch status --sglang" in done.err
