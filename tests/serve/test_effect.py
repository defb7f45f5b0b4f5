"""A patch with nothing to do under the command's options is said to have none; what is not known is not said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlapatch.serve.command import Command
from mlapatch.serve.effect import effect
from mlapatch.serve.gpu_state import GpuState
from mlapatch.serve.preflight import Context, Finding, PatchedFile, PatchFacts
from mlapatch.serve.server_options import ServerOptions

FILE = PatchedFile(Path("/sp/sglang/srt/layers/attention/flashinfer_mla_backend.py"), "ab" * 32, ("active-cast",))
RUNNER = PatchedFile(Path("/sp/sglang/srt/model_executor/model_runner.py"), "ab" * 32, ("profile-decode",))
WHOLE = Command("python", "/usr/bin/python", "sglang.launch_server", whole=True)
GLM: dict[str, Any] = {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 2048, "kv_lora_rank": 512}
V3: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}
FLASHINFER = "--attention-backend flashinfer"
FP8 = "--kv-cache-dtype fp8_e4m3"


def found(
    options: str, *files: PatchedFile, config: object = None, folder: Path | None = None, sm: int = 0, **more: Any
) -> Finding:
    if folder is not None and config is not None:
        (folder / "config.json").write_text(json.dumps(config))
        options += f" --model-path {folder}"
    gpus = [GpuState(0, "GPU-0aa", "GPU", sm, 0, 96 << 30, 0, ())] if sm else None
    facts = PatchFacts(sglang="0.5.9", files=files or (FILE,))
    settings: dict[str, Any] = {"patches": facts, "gpus": gpus, "command": WHOLE} | more
    (finding,) = effect(Context(ServerOptions.of(options.split()), {}, **settings))
    return finding


# ------------------------------------------------------------------------------------------------------------ backends
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (f"--attention-backend triton {FP8}", "--attention-backend triton does not use flashinfer MLA"),
        (f"--attention-backend fa3 {FP8}", "--attention-backend fa3 does not use flashinfer MLA"),
        (f"--attention-backend dsa {FP8}", "--attention-backend dsa does not use flashinfer MLA"),
        (
            f"{FLASHINFER} --prefill-attention-backend fa3 --decode-attention-backend triton {FP8}",
            "--prefill-attention-backend fa3 and --decode-attention-backend triton do not use flashinfer MLA",
        ),
        (
            f"--attention-backend triton --speculative-draft-attention-backend triton {FP8}",
            "--attention-backend triton does not use flashinfer MLA",
        ),
    ],
)
def test_another_backend(options: str, text: str) -> None:
    finding = found(options)
    assert (finding.state, finding.text) == ("warn", f"active-cast has no effect: {text}")
    assert finding.next == FLASHINFER


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        (f"{FLASHINFER} {FP8}", "ok", "an FP8 pool"),
        (f"{FLASHINFER} --kv-cache-dtype fp8_e5m2", "ok", "an FP8 pool"),
        (f"--attention-backend triton --prefill-attention-backend flashinfer {FP8}", "ok", "in prefill"),
        (f"{FLASHINFER} --prefill-attention-backend fa3 {FP8}", "ok", "in decode"),
        (f"--decode-attention-backend triton {FP8}", "skip", "does not name both"),  # the release chooses the prefill's
        (f"--attention-backend flashmla {FP8}", "skip", "does not name both"),  # it prefills with flashinfer MLA
        (f"--attention-backend trtllm_mla {FP8}", "skip", "does not name both"),
        (f"--attention-backend a-new-one {FP8}", "skip", "does not name both"),
        (f"--attention-backend triton --speculative-draft-attention-backend flashinfer {FP8}", "skip", "both"),
        (FP8, "skip", "does not name both"),
    ],
)
def test_a_backend_that_may_be_flashinfers(options: str, state: str, words: str) -> None:
    finding = found(options)
    assert finding.state == state
    assert words in finding.text


def test_a_dsa_model_runs_on_the_sparse_backend_by_default(tmp_path: Path) -> None:
    finding = found(FP8, config=GLM, folder=tmp_path)
    assert finding.state == "warn"
    assert "without --attention-backend a DSA model" in finding.text
    assert found(FP8, config=V3, folder=tmp_path).state == "skip"
    assert found(FP8, config={**GLM, "architectures": ["AnotherForCausalLM"]}, folder=tmp_path).state == "skip"


# ---------------------------------------------------------------------------------------------------------------- pool
@pytest.mark.parametrize("dtype", ["bf16", "bfloat16"])
def test_a_pool_that_is_not_fp8(dtype: str) -> None:
    finding = found(f"{FLASHINFER} --kv-cache-dtype {dtype}")
    assert (finding.state, finding.next) == ("warn", FP8)
    assert finding.text == (
        f"active-cast has no effect: the KV pool is not FP8 (--kv-cache-dtype {dtype}), so nothing is cast"
    )


@pytest.mark.parametrize("given", ["", "--kv-cache-dtype auto"])
@pytest.mark.parametrize(
    ("config", "sm", "state"),
    [
        (None, 90, "skip"),  # a Hugging Face name: nothing is known of the checkpoint
        (V3, 0, "warn"),
        ({**V3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, 0, "warn"),
        ({**V3, "quantization_config": {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}}, 0, "skip"),
        ({**V3, "quantization_config": {"quant_method": "modelopt"}}, 0, "skip"),
        ({**V3, "quantization_config": "fp8"}, 0, "skip"),
        ({**V3, "architectures": ["AnotherForCausalLM"]}, 0, "skip"),
        ({**V3, "architectures": None}, 0, "skip"),
        (GLM, 90, "warn"),
        (GLM, 120, "skip"),  # FP8 there by default
        (GLM, 0, "skip"),
    ],
)
def test_auto_is_judged_where_it_is_known(tmp_path: Path, given: str, config: object, sm: int, state: str) -> None:
    finding = found(f"{FLASHINFER} {given}", config=config, folder=tmp_path, sm=sm)
    assert finding.state == state, finding
    if state == "warn":
        assert (given or "no --kv-cache-dtype") in finding.text


def test_what_may_make_auto_fp8(tmp_path: Path) -> None:
    assert found(f"{FLASHINFER} --quantization modelopt_fp4", config=V3, folder=tmp_path).state == "skip"
    override = '--json-model-override-args {"quantization_config":{"quant_method":"modelopt"}}'
    assert found(f"{FLASHINFER} {override}", config=V3, folder=tmp_path).state == "skip"
    (tmp_path / "hf_quant_config.json").touch()
    assert found(FLASHINFER, config=V3, folder=tmp_path).state == "skip"


def test_a_draft_with_a_pool_of_its_own() -> None:
    options = f"{FLASHINFER} --kv-cache-dtype bf16 --speculative-draft-kv-cache-dtype fp8_e4m3"
    assert found(options).state == "skip"


# ------------------------------------------------------------------------------------------------------ what it judges
@pytest.mark.parametrize("options", ["--attention-backend triton", f"{FLASHINFER} {FP8}"])
def test_other_files_are_not_judged(options: str) -> None:
    assert found(options, RUNNER).state == "skip"
    both = found(options, RUNNER, FILE)
    assert "profile-decode" not in both.text


def test_options_that_may_be_added_are_not_judged() -> None:
    assert found("--attention-backend triton", command=Command("bash", "/bin/bash")).state == "skip"
    assert found("--attention-backend triton --config more.yaml").state == "skip"
    assert found("--attention-backend triton", patches=None).state == "skip"


@pytest.mark.parametrize(
    "options",
    [
        f"--attention-backend triton --prefill-attention flashinfer {FP8}",
        f"--attention-backend triton --dec flashinfer {FP8}",
        f"--attention-backend triton --attention-b flashinfer {FP8}",
        f"--attention-backend triton --speculative-draft-attention flashinfer {FP8}",
        f"{FLASHINFER} --kv-cache-dtype bf16 --kv-cache fp8_e4m3",
        f"{FLASHINFER} --kv-cache-d=bf16",
    ],
)
def test_an_abbreviated_option_is_not_judged(options: str) -> None:
    """argparse takes it; it was not seen, and what stands beside it was judged."""
    finding = found(options)
    assert (finding.state, "is an abbreviation" in finding.text) == ("skip", True)


# ------------------------------------------------------------------------------------------------ what the source says
@pytest.mark.verify
@pytest.mark.parametrize("version", ["0.5.9", "0.5.15.post1", "0.5.23"])
def test_only_these_backends_know_flashinfers(version: str, release: Callable[[str], Path]) -> None:
    srt = release(version) / "sglang/srt"
    users = {
        path.name
        for path in (srt / "layers/attention").rglob("*.py")
        if "import FlashInferMLAAttnBackend" in (text := path.read_text("utf-8"))
        or " FlashInferMLAAttnBackend,\n" in text
    }
    may = {"attention_registry.py", "cutlass_mla_backend.py", "flashmla_backend.py", "trtllm_mla_backend.py"}
    assert users <= may
    assert {"attention_registry.py", "flashmla_backend.py"} <= users
