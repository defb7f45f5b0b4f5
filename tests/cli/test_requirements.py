"""fp8-plan on machines that cannot run it: exit 5 with the reason, unless --force says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlapatch.assess
from tests.cli.conftest import Site, SiteFactory


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlapatch.assess, "detected_sms", lambda: ())


def refusal(here: Site, *options: str) -> str:
    frozen = here.snapshot()
    status = here.ok("status", "--json", *options)
    assert status.verdicts["fp8-plan"] == "unsupported"
    done = here("apply", "fp8-plan", *options)
    assert done.code == 5
    assert here.snapshot() == frozen
    assert status.reason("fp8-plan") in done.err
    assert "next: mlapatch apply auto picks a patch that fits; --force overrides this refusal" in done.err
    return done.err


def test_the_pinned_flashinfer_is_too_old(site: SiteFactory) -> None:
    text = refusal(site("0.5.9"), "--sm", "90")
    assert "needs flashinfer >=0.6.14, and flashinfer 0.6.3 is pinned: older flashinfer cannot compile FP8 KV" in text


def test_the_installed_flashinfer_counts_before_the_pin(site: SiteFactory) -> None:
    here = site("0.5.23")
    assert here.verdicts("--sm", "90")["fp8-plan"] == "applicable"
    (here.folder / "flashinfer_python-0.6.12.dist-info").mkdir()
    assert "flashinfer 0.6.12 is installed" in refusal(here, "--sm", "90")
    (here.folder / "flashinfer_python-0.6.12.dist-info").rename(here.folder / "flashinfer_python-0.7.2.dist-info")
    here.ok("apply", "fp8-plan", "--gpu", "h200")


def test_sm120(site: SiteFactory) -> None:
    here = site("0.5.23")
    assert "needs SM90, and the GPU is SM120 (--sm 120)" in refusal(here, "--sm", "120")
    assert "needs SM90, and the GPU is SM120 (--gpu rtx-pro-6000)" in refusal(here, "--gpu", "rtx-pro-6000")


def test_no_gpu(site: SiteFactory) -> None:
    assert "needs SM90, and no GPU was found here (--gpu h200 or --sm 90 stands in for one)" in refusal(site("0.5.23"))


def test_gpus_of_two_kinds(site: SiteFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlapatch.assess, "detected_sms", lambda: (90, 120))
    assert "needs SM90, and the GPU is SM120 (detected)" in refusal(site("0.5.23"))


def test_no_flashinfer_at_all(site: SiteFactory) -> None:
    here = site("0.5.23")
    metadata = next(here.folder.glob("sglang-*.dist-info")) / "METADATA"
    metadata.write_bytes(metadata.read_bytes().replace(b"flashinfer_python", b"other_package"))
    assert "needs flashinfer >=0.6.14, and none is installed or pinned beside this SGLang" in refusal(
        here, "--sm", "90"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpu", "voodoo-2"), "no GPU is called"),
        (("--gpu", "h200x"), "did you mean 'h200'?"),
        (("--sm", "1200"), "is no compute capability"),
        (("--gpu", "h200", "--sm", "120"), "contradict each other"),
    ],
)
def test_an_unknown_gpu_is_usage(options: tuple[str, ...], said: str, site: SiteFactory) -> None:
    here = site("0.5.23")
    for verb in ("status", "apply auto", "check", "backends"):
        done = here(*verb.split(), *options)
        assert done.code == 2, done.err
        assert said in done.err
    assert here("status", "--gpu", "h200", "--sm", "90").code == 0


def test_force_overrides_with_a_warning(site: SiteFactory) -> None:
    here = site("0.5.9")
    original = here.bytes
    done = here.ok("apply", "fp8-plan", "--force", "--sm", "120")
    assert "warning: fp8-plan is forced although it is unsupported here: needs flashinfer" in done.err
    assert here.verdicts("--sm", "120")["fp8-plan"] == "applied"
    here.ok("revert")
    assert here.bytes == original


def test_a_release_that_a_patch_does_not_support(site: SiteFactory, tmp_path: Path) -> None:
    """Forced by version, it stays while another patch comes and goes."""
    mine = tmp_path / "catalogue" / "mine"
    mine.mkdir(parents=True)
    (mine / "patch.toml").write_text(
        """
name = "mine"
summary = "Only for another release"
target = "srt/layers/attention/flashinfer_mla_backend.py"
sglang = "<0.5"
sglang-reason = "nobody tried it later"
[[edit]]
scope = "FlashInferMLAAttnBackend.get_cuda_graph_seq_len_fill_value"
before = "return 1"
code = "added = 1"
[[post]]
scope = "FlashInferMLAAttnBackend.get_cuda_graph_seq_len_fill_value"
present = "added = 1"
"""
    )
    here, options = site("0.5.9"), ("--patches", mine.parent)
    original = here.bytes
    refused = here("apply", "mine", *options)
    assert refused.code == 5
    assert "SGLang 0.5.9: nobody tried it later" in refused.err
    done = here.ok("apply", "mine", "--force", *options)
    assert "warning: mine is forced although it is unsupported here" in done.err
    only_mine = here.bytes
    here.ok("apply", "gather-cast", *options)
    assert here.verdicts(*options)["mine"] == "applied"
    here.ok("revert", "gather-cast", *options)
    assert here.bytes == only_mine
    here.ok("revert", "mine", *options)
    assert here.bytes == original
