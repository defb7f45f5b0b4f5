"""Which GPU a name means, and what `--gpu` and `--sm` accept in place of one that is not here."""

from __future__ import annotations

import pytest

from mlapatch.commands.estimate import estimate
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


#: As nvidia-smi prints them: the card of the table by its architecture, but with another memory.
OTHERS = [
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H20-3e",
    "NVIDIA H800 PCIe",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "NVIDIA H200 MIG 1g.18gb",
    "NVIDIA A100-40C",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D v2",
]


@pytest.mark.parametrize("name", OTHERS)
def test_another_memory_has_the_architecture_but_not_the_figures(name: str) -> None:
    assert gpus.other_form(name, gpus.find(name))
    with pytest.raises(MlapatchError, match="figures") as caught:
        estimate(gpu=name)
    assert caught.value.exit is Exit.USAGE
    assert caught.value.next.startswith("give --bandwidth and --memory")
    for bandwidth, memory in ((1.5, None), (None, 40.0)):
        with pytest.raises(MlapatchError, match="figures"):
            estimate(gpu=name, bandwidth=bandwidth, memory=memory)
    gpu = estimate(gpu=name, bandwidth=1.5, memory=40).data["gpu"]
    assert gpu == {
        "name": name,
        "sm": gpus.find(name).sm,
        "bandwidth": 1.5e12,
        "memory": 40e9,
        "cast_rate": None,
        "assumed": False,
    }


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in REAL if name not in {*OTHERS, "A100-SXM4-40GB"}),
        *gpus.GPUS,
        *(gpu.title for gpu in gpus.GPUS.values()),
        "h100 80gb",
        "NVIDIA GH200 120GB",
        "H200 141 GB",
        "NVIDIA GeForce RTX 5090 D",
    ],
)
def test_the_tables_own_cards_have_its_figures(name: str) -> None:
    gpu = estimate(gpu=name).data["gpu"]
    assert isinstance(gpu, dict)
    assert gpu["bandwidth"] == gpus.find(name).bandwidth


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A10", "NVIDIA A10G", "NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000", "Quadro RTX 6000", "h20x0", "b100"],
)
def test_another_card_is_not_suggested_for_one_that_is_unknown(name: str) -> None:
    with pytest.raises(MlapatchError, match="no GPU is called") as caught:
        gpus.find(name)
    assert "did you mean" not in caught.value.what


@pytest.mark.parametrize(
    ("name", "near"),
    [("rtx4090", "rtx-4090"), ("rtx-pr-6000", "rtx-pro-6000"), ("RTXPRO6000", "rtx-pro-6000"), ("gb-200", "gb200")],
)
def test_a_typing_error_is_told_the_gpu(name: str, near: str) -> None:
    with pytest.raises(MlapatchError, match=f"did you mean '{near}'"):
        gpus.find(name)
