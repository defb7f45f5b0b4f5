"""Preflight checks, one table each: what is fine, what is not, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.serve import gpu_state, libraries, model_fit, preflight
from mlapatch.serve.command import Command
from mlapatch.serve.effect import effect
from mlapatch.serve.gpu_state import GpuState
from mlapatch.serve.patience import read
from mlapatch.serve.preflight import Context, Finding, PatchedFile, PatchFacts
from mlapatch.serve.ranks import Layout
from mlapatch.serve.server_options import ServerOptions

GLM = {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 2048}
SERVER = Command("python", "/usr/bin/python", "sglang.launch_server", whole=True)
WRAPPER = Command("python", "/usr/bin/python")
FLASHINFER_FP8 = "--attention-backend flashinfer --kv-cache-dtype fp8_e4m3"


def gpu(index: int = 0, sm: int = 120, used: int = 0, pids: tuple[int, ...] = ()) -> GpuState:
    return GpuState(index, f"GPU-{index}aa", "RTX PRO 6000", sm, used, 96 << 30, 0, pids)


def context(options: str = "", **more: Any) -> Context:
    return Context(ServerOptions.of(options.split()), more.pop("environment", {}), **more)


def with_model(folder: Path, config: object, options: str, **more: Any) -> Context:
    (folder / "config.json").write_text(json.dumps(config))
    return context(f"--model-path {folder} {options}", **more)


def states(findings: Any) -> list[str]:
    return [finding.state for finding in findings]


def text_of(findings: Any) -> str:
    return " | ".join(finding.text for finding in findings)


# --------------------------------------------------------------------------------------------------------- options
def test_options() -> None:
    line = "python -m x --tp 8 --port=9 --enable-a --nsa-decode-backend trtllm --port 10"
    options = ServerOptions.of(line.split())
    assert (len(Layout.of(options).names), options.port, options.dsa_backends) == (8, 10, ("", "trtllm"))
    assert options.given["enable-a"] == ""
    assert options.number("absent") is None
    assert options.host == "127.0.0.1"
    assert ServerOptions.of(["--host", "0.0.0.0"]).host == "127.0.0.1"  # noqa: S104


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--disable-cuda-graph", "--disable-cuda-graph"),
        ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-decode"),
        ("--cuda-graph-backend-decode full", ""),
        ("", ""),
    ],
)
def test_disabled_graphs_are_warned_of(line: str, option: str) -> None:
    found = list(model_fit.graphs(context(line)))
    assert states(found) == (["warn"] if option else ["ok"])
    assert option in text_of(found)


# ---------------------------------------------------------------------------------------------------------- layout
@pytest.mark.parametrize(
    ("config", "options", "state", "words"),
    [
        (GLM, f"{FLASHINFER_FP8} --nsa-prefill-backend trtllm --nsa-decode-backend trtllm", "ok", "plain"),
        (GLM, f"{FLASHINFER_FP8} --dsa-prefill-backend trtllm --dsa-decode-backend trtllm", "ok", "plain"),
        (GLM, FLASHINFER_FP8, "fail", "packed"),
        (GLM, f"{FLASHINFER_FP8} --dsa-prefill-backend trtllm", "fail", "only one"),
        (GLM, "--attention-backend flashinfer --kv-cache-dtype bfloat16", "ok", "bfloat16"),
        (GLM, "--attention-backend triton --kv-cache-dtype fp8_e4m3", "fail", "triton misreads"),
        (GLM, "--attention-backend nsa --kv-cache-dtype fp8_e4m3", "ok", "nsa"),
        (GLM, "--kv-cache-dtype fp8_e4m3", "ok", "default"),
        (GLM, "--attention-backend cutlass_mla --kv-cache-dtype fp8_e4m3", "fail", "128"),
        (GLM, "--attention-backend flashinfer --kv-cache-dtype fp8_e5m2", "fail", "fp8_e5m2"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, FLASHINFER_FP8, "skip", "no DSA model"),
    ],
)
def test_layout(tmp_path: Path, config: object, options: str, state: str, words: str) -> None:
    found = list(model_fit.layout(with_model(tmp_path, config, options)))
    assert states(found) == [state]
    assert words in text_of(found)
    assert all(f.exit is Exit.ENVIRONMENT for f in found)


@pytest.mark.parametrize(
    ("version", "sm", "state"),
    [("0.5.9", 120, "fail"), ("0.5.15.post1", 120, "ok"), ("0.5.15.post1", 90, "fail"), ("0.5.23", 120, "fail")],
)
def test_layout_where_the_release_chooses(tmp_path: Path, version: str, sm: int, state: str) -> None:
    facts = PatchFacts(sglang=version)
    found = model_fit.layout(with_model(tmp_path, GLM, FLASHINFER_FP8, patches=facts, gpus=[gpu(sm=sm)]))
    assert states(found) == [state]


@pytest.mark.parametrize(
    ("config", "options", "state"),
    [
        (GLM, "--chunked-prefill-size 16", "fail"),
        (GLM, "--chunked-prefill-size 64", "ok"),
        ({**GLM, "index_kpool": 2}, "--chunked-prefill-size 64", "fail"),
        ({}, "--chunked-prefill-size 16", "ok"),
        ({}, "--chunked-prefill-size 16 --page-size 64", "fail"),
        ({}, "--chunked-prefill-size -1 --page-size 64", "skip"),
        ({}, "--page-size 64", "skip"),
        ({}, "--chunked-prefill-size 64 --attention-backend cutlass_mla", "fail"),
    ],
)
def test_chunk(tmp_path: Path, config: object, options: str, state: str) -> None:
    assert states(model_fit.chunk(with_model(tmp_path, config, options))) == [state]


# -------------------------------------------------------------------------------------------------------------- model
def test_model(tmp_path: Path) -> None:
    assert states(preflight.model(context())) == ["warn"]
    assert states(preflight.model(context(f"--model-path {tmp_path}/none"))) == ["fail"]
    assert states(preflight.model(context("--model-path zai-org/GLM-5"))) == ["warn"]
    assert states(preflight.model(context(f"--model-path {tmp_path}"))) == ["fail"]
    (tmp_path / "config.json").write_text("{")
    assert "no JSON" in text_of(preflight.model(context(f"--model-path {tmp_path}")))
    assert states(preflight.model(with_model(tmp_path, GLM, ""))) == ["ok"]


# --------------------------------------------------------------------------------------------------------------- GPUs
@pytest.mark.parametrize(
    ("gpus", "state", "words"),
    [
        (None, "warn", "NVML"),
        ([gpu(0), gpu(1)], "ok", "2 x"),
        ([gpu(0)], "fail", "2 GPUs; 1"),
        ([gpu(0), gpu(1, pids=(1,))], "fail", "pid 1"),
        ([gpu(0), gpu(1, used=40 << 30)], "fail", "40.0 of 96 GiB"),
        ([gpu(0), gpu(1), gpu(2, used=40 << 30)], "ok", "idle"),
    ],
)
def test_gpus(gpus: list[GpuState] | None, state: str, words: str) -> None:
    found = list(preflight.gpus(context("--tp-size 2", gpus=gpus)))
    assert states(found) == [state]
    assert words in text_of(found)


def test_visible_devices() -> None:
    four = [gpu(i) for i in range(4)]
    assert gpu_state.visible(four, None) == four
    assert [g.index for g in gpu_state.visible(four, "3,1")] == [3, 1]
    assert [g.index for g in gpu_state.visible(four, "GPU-2,9,0")] == [2]
    assert gpu_state.visible(four, "") == []


def test_no_driver_is_an_answer() -> None:
    assert gpu_state.look({}) is None or isinstance(gpu_state.look({}), list)


# ------------------------------------------------------------------------------------------------- patches and guard
FILE = PatchedFile(Path("/sp/sglang/x.py"), "ab" * 32, ("active-cast",))


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (PatchFacts(), "warn", "stock"),
        (PatchFacts(files=(FILE,), verdicts={"active-cast": ("applied", "")}), "ok", "active-cast"),
        (PatchFacts(required=("a",), verdicts={"a": ("drifted", "an anchor is gone")}), "fail", "anchor"),
        (PatchFacts(required=("a",)), "fail", "no such patch"),
        (PatchFacts(verdicts={"a": ("lost", "upgraded")}), "fail", "lost"),
        (PatchFacts(verdicts={"a": ("unsupported", "needs SM90")}), "warn", "stock"),
        (
            PatchFacts(files=(FILE,), verdicts={"active-cast": ("unsupported", "applied, but needs SM90")}),
            "fail",
            "SM90",
        ),
    ],
)
def test_patches(facts: PatchFacts, state: str, words: str) -> None:
    found = list(preflight.patches(context(patches=facts)))
    assert states(found) == [state]
    assert words in text_of(found)


@pytest.mark.parametrize(
    ("state", "expected"), [("none", ["skip"]), ("clean", ["ok"]), ("violated", ["fail"]), ("unrecorded", ["fail"])]
)
def test_guard(state: str, expected: list[str]) -> None:
    found = list(preflight.guard(context(patches=PatchFacts(guard=state))))
    assert states(found) == expected
    assert all(f.exit is Exit.REFUSED for f in found if f.state == "fail")


def test_libraries() -> None:
    assert states(model_fit.libraries(context(patches=PatchFacts()))) == ["skip"]
    assert states(model_fit.libraries(context(patches=PatchFacts(flashinfer="0.6.3 (installed)")))) == ["ok"]
    assert states(model_fit.libraries(context(patches=PatchFacts(flashinfer="0.6.3 (pinned)")))) == ["skip"]
    wrong = PatchFacts(library_problems=("a", "b"))
    assert states(model_fit.libraries(context(patches=wrong, command=SERVER))) == ["fail", "fail"]
    assert states(model_fit.libraries(context(patches=wrong, command=WRAPPER))) == ["warn", "warn"]
    versions = {"flashinfer-python": "0.6.2", "flashinfer-cubin": "0.6.3", "flashinfer-jit-cache": "0.6.2+cu130"}
    assert len(libraries.problems(versions, "0.5.9")) == 2
    assert len(libraries.problems(versions, "0.5.9", {"FLASHINFER_DISABLE_VERSION_CHECK": "1"})) == 1
    assert libraries.problems({}, "") == []


@pytest.mark.parametrize(
    ("name", "gpus", "state"),
    [("torch", None, "fail"), ("sgl-kernel", None, "warn"), ("sglang-kernel", [gpu()], "fail")],
)
def test_a_missing_library(name: str, gpus: list[GpuState] | None, state: str) -> None:
    gone = libraries.Missing(name, "", "/venv/bin/python")
    facts = PatchFacts(missing=(gone,))
    assert states(model_fit.libraries(context(patches=facts, gpus=gpus, command=SERVER))) == [state]
    assert states(model_fit.libraries(context(patches=facts, gpus=gpus, command=WRAPPER))) == ["warn"]


@pytest.mark.parametrize("facts", [None, PatchFacts()])
@pytest.mark.parametrize("config", [None, GLM, {}])
def test_no_check_is_silent(tmp_path: Path, facts: PatchFacts | None, config: object) -> None:
    asked = context("", patches=facts) if config is None else with_model(tmp_path, config, "", patches=facts)
    for check in (*preflight.CHECKS, *model_fit.FIT_CHECKS, effect):
        found = list(check(asked))
        assert found, check
        assert all(finding.text for finding in found)


def test_a_check_can_be_added() -> None:
    def mine(_: Context) -> list[Finding]:
        return [Finding("mine", "ok", "fine")]

    assert preflight.run_checks(context(), [mine]) == [Finding("mine", "ok", "fine")]


# ----------------------------------------------------------------------------------------------------------- patience
def test_patience() -> None:
    assert read(["weights=900", "capture=5", "Warm Up=0"]) == {"weights": 900, "graph-capture": 5, "warm-up": 0}
    for wrong in ("weights", "weights=x", "other=3", "weights=-1", "weights=nan"):
        with pytest.raises(MlapatchError) as raised:
            read([wrong])
        assert raised.value.exit is Exit.USAGE
