"""Which GPU a name means, and what `--gpu` and `--sm` accept in place of one that is not here."""

from __future__ import annotations

import pytest

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import gpus

#: As nvidia-smi prints them.
REAL = {
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100",
    "NVIDIA H20": "h20",
    "NVIDIA H20-3e": "h20",
    "NVIDIA H800": "h800",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": "gb300",
    "NVIDIA GB10": "gb10",
    "NVIDIA A100-SXM4-80GB": "a100",
    "A100-SXM4-40GB": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000",
}


@pytest.mark.parametrize(
    ("name", "key"), [*REAL.items(), *((key, key) for key in gpus.GPUS), ("RTX_PRO_6000", "rtx-pro-6000")]
)
def test_nvidia_smis_names_are_understood(name: str, key: str) -> None:
    assert gpus.find(name).name == key


@pytest.mark.parametrize(
    "name",
    [
        "h200x",
        "b2000",
        "a1000",
        "h2000",
        "h2",
        "l40",
        "xh200",
        "NVIDIA RTX A1000",
        "NVIDIA RTX 6000 Ada Generation",
        "",
        "-",
    ],
)
def test_another_card_is_not_taken_for_one_that_begins_like_it(name: str) -> None:
    with pytest.raises(MlapatchError, match="no GPU is called") as caught:
        gpus.find(name)
    assert caught.value.exit is Exit.USAGE
    assert "h200" in caught.value.expected


def test_a_misspelled_gpu_is_told_the_near_one() -> None:
    with pytest.raises(MlapatchError, match="did you mean 'h200'"):
        gpus.find("NVIDIA h200x")


@pytest.mark.parametrize("sm", [-1, 0, 7, 9, 91, 102, 200, 900, 1200])
def test_what_is_no_compute_capability(sm: int) -> None:
    assert not gpus.is_capability(sm)


@pytest.mark.parametrize("sm", [80, 90, 103, 120, 130])
def test_a_compute_capability_is_taken(sm: int) -> None:
    assert gpus.is_capability(sm)
    assert gpus.stand_in(None, sm) == (sm, f"--sm {sm}")


def test_every_gpu_of_the_table_has_a_known_capability() -> None:
    assert {gpu.sm for gpu in gpus.GPUS.values()} <= set(gpus.CAPABILITIES)


def test_a_gpu_and_a_capability_must_agree() -> None:
    assert gpus.stand_in("h200", 90) == (90, "--gpu h200")
    assert gpus.stand_in(None, None) is None
    with pytest.raises(MlapatchError, match="contradict each other") as caught:
        gpus.stand_in("h200", 120)
    assert (caught.value.exit, caught.value.found) == (Exit.USAGE, "--gpu h200 --sm 120")
