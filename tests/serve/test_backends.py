"""backends and doctor: the table's rows, and that the releases' source says what the rows say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mlapatch.commands.backends import backends
from mlapatch.commands.doctor import doctor
from mlapatch.commands.estimate import estimate
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome
from mlapatch.serve.backends import table_for
from mlapatch.serve.server_options import dsa_prefix
from tests.conftest import TreeFactory


def ask(**options: Any) -> dict[str, dict[str, Any]]:
    settings = {"preset": "glm-5", "gpu": "rtx-pro-6000", "release": "0.5.9"} | options
    rows: Any = backends(**settings).data["backends"]
    return {row["backend"]: row for row in rows}


CAN = {"yes", "with a catch"}


@pytest.mark.parametrize(
    ("options", "able"),
    [
        ({"release": "0.5.9", "gpu": "rtx-pro-6000"}, {"flashinfer", "triton"}),
        ({"release": "0.5.9", "gpu": "h200"}, {"flashinfer", "triton", "flashmla", "fa3", "nsa"}),
        ({"release": "0.5.23", "gpu": "rtx-pro-6000"}, {"flashinfer", "triton", "dsa"}),
        ({"release": "0.5.23", "gpu": "h200"}, {"flashinfer", "triton", "flashmla", "fa3", "dsa"}),
        ({"preset": "deepseek-v3", "gpu": "b200"}, {"flashinfer", "triton", "trtllm_mla", "cutlass_mla"}),
        (
            {"preset": "deepseek-v3", "gpu": "b200", "release": "0.5.23"},
            {"flashinfer", "triton", "trtllm_mla", "cutedsl_mla"},
        ),
        ({"preset": "deepseek-v3", "gpu": "rtx-pro-6000"}, {"flashinfer", "triton"}),
        ({"preset": "deepseek-v3", "gpu": "rtx-pro-6000", "tp": 1}, {"flashinfer", "triton", "trtllm_mla"}),
        ({"preset": "deepseek-v3", "gpu": "h200", "kv_cache_dtype": "fp8_e5m2"}, {"flashinfer", "triton", "flashmla"}),
        ({"preset": "glm-5", "gpu": "b200"}, {"flashinfer", "triton", "nsa"}),
    ],
)
def test_who_can(options: dict[str, Any], able: set[str]) -> None:
    assert {name for name, row in ask(**options).items() if row["can"] in CAN} == able


@pytest.mark.parametrize(
    ("options", "backend", "words"),
    [
        ({}, "trtllm_mla", "qk_nope_head_dim 128; this model has 192"),
        ({"flashinfer": "0.6.12"}, "trtllm_mla", "128 query heads a rank; this model has 8"),
        ({"gpu": "h200"}, "trtllm_mla", "needs Blackwell"),
        ({"kv_cache_dtype": "bfloat16"}, "trtllm_mla", "not bfloat16"),
        ({"gpu": "b200"}, "cutlass_mla", "pages of 128"),
        ({}, "fa3", "asserts SM90"),
        ({}, "nsa", "DeepGEMM has no kernel"),
        ({"flashinfer": "0.6.2"}, "flashinfer", ">= 0.6.3"),
        ({"release": "0.5.23", "flashinfer": "0.7.1"}, "flashinfer", ">= 0.7.2"),
        ({}, "triton", "--nsa-prefill-backend trtllm"),
        ({"release": "0.5.23"}, "triton", "--dsa-prefill-backend trtllm"),
        ({"release": "0.5.23"}, "cutedsl_mla", "needs SM100"),
    ],
)
def test_why(options: dict[str, Any], backend: str, words: str) -> None:
    assert words in ask(**options)[backend]["why"]


def test_no_patch_is_said_plainly() -> None:
    outcome = backends(preset="glm-5", gpu="rtx-pro-6000", release="0.5.9")
    advice = " ".join(outcome.data["advice"])  # type: ignore[arg-type]
    assert outcome.data["patch_needed"] is False
    assert "No patch is needed with --attention-backend triton" in advice
    assert "What triton costs" in advice
    assert "mlapatch apply auto" in advice
    bf16 = backends(preset="glm-5", gpu="h200", release="0.5.9", kv_cache_dtype="bfloat16")
    assert "half as many tokens" in " ".join(bf16.data["advice"])  # type: ignore[arg-type]


def test_releases_in_between_say_so() -> None:
    assert table_for(Version("0.5.9")) == ("0.5.9", "")
    assert table_for(Version("0.5.12"))[0] == "0.5.9"
    assert "0.5.21 may differ" in table_for(Version("0.5.21"))[1]


@pytest.mark.parametrize(("version", "flag"), [("0.5.9", "nsa"), ("0.5.15.post1", "dsa"), ("0.5.23", "dsa")])
def test_flags_are_spelled_as_the_installed_release_does(wheel_dir: TreeFactory, version: str, flag: str) -> None:
    """Its own source says so, also where it keeps the other spelling as a deprecated alias."""
    package = wheel_dir(version) / "sglang"
    sources = [package / "srt/server_args.py", *(package / "srt/arg_groups").rglob("*.py")]
    texts = [re.sub(r"\s+", " ", source.read_text("utf-8")) for source in sources if source.is_file()]
    assert any(f"{flag}_prefill_backend:" in text for text in texts)
    found = backends(preset="glm-5", gpu="rtx-pro-6000", sglang=package).data["backends"]
    rows: Any = {row["backend"]: row for row in found}  # type: ignore[attr-defined]
    assert f"--{flag}-prefill-backend trtllm and --{flag}-decode-backend trtllm" in rows["triton"]["why"]
    assert flag in rows
    other = "dsa" if flag == "nsa" else "nsa"
    assert f"--{other}-" not in json.dumps(found)


def test_a_release_that_is_not_installed_is_spelled_by_its_number() -> None:
    assert [dsa_prefix(v) for v in ("0.5.9", "0.5.12.post1", "0.5.13", "0.5.23", "unknown")] == [
        *("nsa", "nsa", "dsa", "dsa", "dsa")
    ]


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"kv_lora_rank": 512, "qk_nope_head_dim": 64, "num_attention_heads": 16, "architectures": ["X"]})
    )
    found = backends(model=tmp_path, sm=90, release="0.5.9", tp=8)
    assert found.data["model"] == {"arch": "X", "nope": 64, "heads_per_rank": 2, "dsa": False}
    file.write_text("{}")
    for wrong in ({"model": file}, {"model": tmp_path / "none"}, {"preset": "none"}):
        with pytest.raises(MlapatchError) as raised:
            backends(sm=90, release="0.5.9", **wrong)
        assert raised.value.exit is Exit.USAGE


VERBS: tuple[Callable[..., Outcome], ...] = (partial(backends, sm=90, release="0.5.9"), estimate)


@pytest.mark.parametrize(
    ("content", "what", "found"),
    [
        (None, "cannot read the model's config", "No such file or directory"),
        ("{", "the model's config is not JSON", "Expecting property name"),
        ("[]", "the model's config is not JSON", "a JSON object is needed"),
        ("{}", "this is not an MLA model", "no kv_lora_rank"),
        ('{"kv_lora_rank": "many"}', "this is not an MLA model", "no kv_lora_rank"),
        ('{"text_config": {"hidden_size": 1}, "model_type": "llava"}', "this is not an MLA model", "model_type llava"),
    ],
)
def test_backends_and_estimate_refuse_a_config_in_the_same_words(
    tmp_path: Path, content: str | None, what: str, found: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    refusals = []
    for model in (tmp_path / "config.json", tmp_path if content else tmp_path / "none"):
        for verb in VERBS:
            with pytest.raises(MlapatchError) as raised:
                verb(model=model)
            refusals.append(raised.value)
    for refusal in refusals:
        assert (refusal.exit, refusal.what) == (Exit.USAGE, what)
        assert refusal.found.startswith(found) or found in refusal.found
        assert ("--model" in refusal.next, "--preset" in refusal.next) == (True, True)


def test_backends_and_estimate_know_the_same_presets() -> None:
    refusals = []
    for verb in VERBS:
        with pytest.raises(MlapatchError) as raised:
            verb(preset="glm-6")
        refusals.append(raised.value)
    assert refusals[0] == refusals[1]
    assert backends(preset="GLM-5", sm=90, release="0.5.9").data["model"] == {
        "arch": "GlmMoeDsaForCausalLM", "nope": 192, "heads_per_rank": 8, "dsa": True,
    }  # fmt: skip


def test_both_take_the_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    """Also where a size stands in both parts: SGLang takes `text_config`."""
    text = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 16}
    (tmp_path / "config.json").write_text(
        json.dumps({"kv_lora_rank": 8, "num_attention_heads": 8, "text_config": text})
    )
    found: Any = backends(model=tmp_path, sm=90, release="0.5.9", tp=1).data["model"]
    assert found["heads_per_rank"] == 16
    estimated: Any = estimate(model=tmp_path, gpu="h200").data["model"]
    assert estimated["layers"] == 4


# ------------------------------------------------------------------------------------------- what the source says
SRT = "sglang/srt"
SAYS = [
    ("0.5.9", "server_args.py", "FlashMLA only supports a page_size of 64"),
    ("0.5.9", "server_args.py", "Cutlass MLA only supports a page_size of 128"),
    ("0.5.9", "server_args.py", '["fp8_e4m3", "fp4_e2m1", "bf16", "auto"]'),
    ("0.5.9", "server_args.py", "FlashAttention3 only supports fp8_e4m3 if using FP8"),
    ("0.5.9", "entrypoints/engine.py", '"flashinfer_python", "0.6.3",'),
    ("0.5.9", "layers/attention/attention_registry.py", "torch.cuda.get_device_capability()[0] == 9"),
    ("0.5.9", "layers/attention/cutlass_mla_backend.py", "PAGE_SIZE = 128"),
    ("0.5.9", "layers/attention/triton_ops/decode_attention.py", "tl.dot(q, k.to(q.dtype))"),
    ("0.5.9", "layers/attention/triton_ops/extend_attention.py", "tl.dot(q.to(k.dtype), k)"),
    ("0.5.9", "mem_cache/memory_pool.py", "assert self.page_size == 64"),
    ("0.5.9", "model_executor/model_runner_kv_cache_mixin.py", 'self.server_args.nsa_prefill_backend == "trtllm" or'),
    ("0.5.23", "arg_groups/overrides.py", "FlashMLA only supports a page_size of 64"),
    ("0.5.23", "arg_groups/overrides.py", '["fp8_e4m3", "bf16", "auto"]'),
    ("0.5.23", "arg_groups/overrides.py", "CuteDSL MLA only supports decoding for now"),
    ("0.5.23", "arg_groups/overrides.py", "Set DSA backends for GLM FP8 KV Cache on SM120/SM121"),
    ("0.5.23", "entrypoints/engine.py", '"flashinfer_python", "0.7.2",'),
    ("0.5.23", "layers/attention/attention_registry.py", "or major == 9, ("),
    ("0.5.23", "mem_cache/memory_pool.py", "assert physical_page_size == 64"),
    ("0.5.23", "mem_cache/kv_cache_configurator.py", 'dsa_prefill_backend == "trtllm" or'),
]


@pytest.mark.verify
@pytest.mark.parametrize(("version", "path", "text"), SAYS)
def test_the_source_says_so(version: str, path: str, text: str, release: Callable[[str], Path]) -> None:
    source = re.sub(r"\s+", " ", (release(version) / SRT / path).read_text("utf-8"))
    assert text in source


@pytest.mark.verify
def test_cutlass_mla_is_gone_and_cutedsl_is_new(release: Callable[[str], Path]) -> None:
    for version, there, gone in (("0.5.9", "cutlass_mla", "cutedsl_mla"), ("0.5.23", "cutedsl_mla", "cutlass_mla")):
        registry = (release(version) / SRT / "layers/attention/attention_registry.py").read_text("utf-8")
        assert f'register_attention_backend("{there}")' in registry
        assert f'register_attention_backend("{gone}")' not in registry


# -------------------------------------------------------------------------------------------------------------- doctor
def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    (site / "sglang" / "srt").mkdir(parents=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "version.py").write_text('__version__ = "0.5.9"\n')
    for name, version in (
        ("flashinfer_python", "0.6.3"),
        ("flashinfer_cubin", "0.6.4"),
        ("flashinfer_jit_cache", "0.6.3+cu129"),
    ):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("SGLANG_API_KEY", "very-secret")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "PHB")
    found = doctor(sglang=site)
    assert found.exit is Exit.OK
    packages: Any = found.data["packages"]
    assert packages["flashinfer-cubin"] == "0.6.4"
    problems = " ".join(found.data["problems"])  # type: ignore[arg-type]
    assert "flashinfer-cubin 0.6.4 does not match" in problems
    assert "flashinfer-jit-cache" not in problems
    settings: Any = found.data["settings"]
    assert settings["SGLANG_API_KEY"] == "***"
    assert settings["NCCL_P2P_LEVEL"] == "PHB"
    assert "very-secret" not in json.dumps(found.data)


def test_doctor_without_sglang(tmp_path: Path) -> None:
    """Exit 5 as every verb that needs one, the page all the same, and the next command."""
    found = doctor(sglang=tmp_path)
    assert found.exit is Exit.ENVIRONMENT
    problems = " ".join(found.data["problems"])  # type: ignore[arg-type]
    assert "no SGLang found" in problems
    assert "next: mlapatch" in problems
    assert found.data["machine"]


def test_doctor_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlapatch.serve.gpu_state.look", lambda _: None)
    found = doctor(sglang=tmp_path)
    problems = " ".join(found.data["problems"])  # type: ignore[arg-type]
    assert "no GPU answers here" in problems
    assert "--gpu NAME" in problems
    assert "nothing looks wrong" not in str(found.blocks)
