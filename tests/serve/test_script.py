"""scripts/run_tp8_cds16.sh: its settings and messages, and its arguments under the checks of real releases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlapatch.serve import model_fit
from mlapatch.serve.preflight import Context
from mlapatch.serve.server_options import ServerOptions

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "run_tp8_cds16.sh"
HARNESS = Path(__file__).parent / "real_server_args.py"
CONFIG = Path(__file__).parent / "data" / "glm_dsa_config.json"
RELEASES = ("0.5.9", "0.5.15.post1", "0.5.23")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "GLM 5"  # a space: quoting is part of the contract
    folder.mkdir()
    shutil.copy(CONFIG, folder / "config.json")
    return folder


def package(folder: Path, *flags: str) -> Path:
    """A site-packages with an sglang that declares some argument fields."""
    root = folder / "site" / "sglang" / "srt"
    root.mkdir(parents=True)
    (root.parent / "__init__.py").write_text("raise SystemExit('the script must not import SGLang')\n")
    (root / "server_args.py").write_text("\n".join(flags))
    return folder / "site"


def run(
    site: Path, *args: str, model: Path | None = None, **env: str
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    settings = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(site), "MLAPATCH_DRY_RUN": "1"}
    if model is not None:
        settings["MODEL_PATH"] = str(model)
    done = subprocess.run(["bash", str(SCRIPT), *args], env=settings | env, capture_output=True, text=True, check=False)
    return done.stdout.splitlines(), done


def options(command: list[str]) -> dict[str, str]:
    """`--name value` pairs after `-m sglang.launch_server`; the last one wins, as in argparse."""
    rest = command[3:]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_defaults(tmp_path: Path, model: Path) -> None:
    command, done = run(package(tmp_path, "nsa_prefill_backend"), model=model)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert options(command) == {
        "--model-path": str(model),
        "--tp-size": "8",
        "--chunked-prefill-size": "64",
        "--kv-cache-dtype": "fp8_e4m3",
        "--attention-backend": "flashinfer",
        "--moe-runner-backend": "flashinfer_cutlass",
        "--mem-fraction-static": "0.92",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--nsa-prefill-backend": "trtllm",
        "--nsa-decode-backend": "trtllm",
    }
    assert "16 -> 64" in done.stderr
    assert "2048 passes" in done.stderr


def test_every_setting_is_an_environment_variable(tmp_path: Path, model: Path) -> None:
    env = {
        "TP_SIZE": "4",
        "CHUNKED_PREFILL_SIZE": "8192",
        "KV_CACHE_DTYPE": "bfloat16",
        "ATTENTION_BACKEND": "triton",
        "MOE_RUNNER_BACKEND": "auto",
        "MEM_FRACTION_STATIC": "0.8",
        "HOST": "0.0.0.0",  # noqa: S104
        "PORT": "9000",
        "DSA_BACKEND": "",
        "NUM_CONTINUOUS_DECODE_STEPS": "16",
    }
    command, done = run(package(tmp_path, "dsa_prefill_backend"), model=model, **env)
    found = options(command)
    for name, value in env.items():
        if name != "DSA_BACKEND":
            assert found[f"--{name.lower().replace('_', '-')}"] == value
    assert not any("dsa" in name for name in found)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("declares", "prefix"),
    [
        (["nsa_prefill_backend"], "--nsa"),
        (["dsa_prefill_backend"], "--dsa"),
        (["nsa_prefill_backend", "dsa_prefill_backend"], "--dsa"),
        ([], None),
    ],
)
def test_dsa_flags_in_the_spelling_of_the_release(
    tmp_path: Path, model: Path, declares: list[str], prefix: str | None
) -> None:
    command, _ = run(package(tmp_path, *declares), model=model)
    flags = {f"{prefix}-prefill-backend", f"{prefix}-decode-backend"} if prefix else set()
    assert {word for word in command if "sa-" in word and word.startswith("--")} == flags


@pytest.mark.parametrize(
    ("config", "args", "env", "chunk"),
    [
        ({"index_topk": 2048}, [], {}, "64"),
        ({"index_topk": 2048, "index_kpool": 2}, [], {}, "128"),
        ({"text_config": {"index_topk": 2048}}, [], {}, "64"),
        ({"index_topk": 2048}, [], {"CHUNKED_PREFILL_SIZE": "65"}, "128"),
        ({"index_topk": 2048}, [], {"CHUNKED_PREFILL_SIZE": "-1"}, "-1"),
        ({}, [], {}, "16"),
        ({}, ["--page-size", "32"], {}, "32"),
        ({}, ["--page-size=24"], {}, "24"),
        ({}, [], {"ATTENTION_BACKEND": "flashmla"}, "64"),
        ({}, [], {"ATTENTION_BACKEND": "cutlass_mla"}, "128"),
        ({}, ["--page-size", "32"], {"ATTENTION_BACKEND": "flashmla"}, "64"),
        ({}, ["--page-size", "999999"], {}, "999999"),
        ({"index_topk": 2048}, [], {"CHUNKED_PREFILL_SIZE": "08"}, "64"),
        ({"index_topk": 2048}, [], {"CHUNKED_PREFILL_SIZE": "0100"}, "128"),
        ({"index_topk": 2048}, [], {"CHUNKED_PREFILL_SIZE": "-09"}, "-9"),
    ],
)
def test_chunk_is_rounded_up_to_the_page_size_that_the_server_will_use(
    tmp_path: Path, model: Path, config: dict[str, Any], args: list[str], env: dict[str, str], chunk: str
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    command, done = run(package(tmp_path, "dsa_prefill_backend"), *args, model=model, **env)
    assert command[command.index("--chunked-prefill-size") + 1] == chunk, done.stderr
    changed = int(chunk) != int(env.get("CHUNKED_PREFILL_SIZE", "16"))
    assert (f"-> {chunk}" in done.stderr) == changed


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {}, "kv_lora_rank": 512, "index_topk": 2048},
        {"text_config": {}, "kv_lora_rank": 512},
        {"text_config": {}, "index_topk": 2048},
        {"text_config": {"index_topk": 2048}, "kv_lora_rank": 512},
        {"text_config": {"kv_lora_rank": 512}, "kv_lora_rank": 512, "index_topk": 2048},
        {"text_config": {"kv_lora_rank": 512, "index_topk": 2048}},
        {"text_config": [], "index_topk": 2048},
        *({"index_topk": 2048, "index_kpool": pool} for pool in ("2", -2, 1.5, 0, True, None, [2], 1 << 24, 3)),
    ],
)
def test_the_script_and_the_preflight_read_a_config_alike(tmp_path: Path, model: Path, config: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(config))
    command, done = run(package(tmp_path, "dsa_prefill_backend"), model=model)
    context = Context(ServerOptions.of(command), {})
    chunk = context.options.number("chunked-prefill-size")
    page = model_fit.page_size(context, config)
    assert chunk == -(-16 // page) * page, done.stderr
    assert {finding.state for finding in model_fit.chunk(context)} == {"ok"}
    assert all(line.startswith("run_tp8_cds16.sh: ") for line in done.stderr.splitlines()), done.stderr


def test_a_hub_name_is_taken_for_a_dsa_model(tmp_path: Path) -> None:
    command, done = run(package(tmp_path, "dsa_prefill_backend"), model=Path("zai-org/GLM-5"))
    assert options(command)["--chunked-prefill-size"] == "64"
    assert "config.json" in done.stderr


def test_extra_arguments_come_last_and_unchanged(tmp_path: Path, model: Path) -> None:
    extra = ["--served-model-name", "a b", "--log-level", "debug"]
    command, _ = run(package(tmp_path, "nsa_prefill_backend"), *extra, model=model)
    assert command[-4:] == extra


def test_usage_errors(tmp_path: Path, model: Path) -> None:
    site = package(tmp_path, "nsa_prefill_backend")
    assert run(site)[1].returncode == 2
    assert "MODEL_PATH" in run(site)[1].stderr
    missing = run(site, model=model, PYTHON=str(tmp_path / "no-python"))[1]
    assert missing.returncode == 5
    assert "PYTHON" in missing.stderr


@pytest.mark.parametrize("size", ["many", "1.5", "0x10", "+16", "1000000000", "99999999999999999999", "-", "1 6"])
def test_a_chunk_that_is_no_size_is_a_usage_error(tmp_path: Path, model: Path, size: str) -> None:
    site = package(tmp_path, "nsa_prefill_backend")
    command, done = run(site, model=model, CHUNKED_PREFILL_SIZE=size, MLAPATCH_DRY_RUN="")
    assert (done.returncode, command) == (2, [])
    wanted = "CHUNKED_PREFILL_SIZE needs a whole number of at most nine digits"
    assert done.stderr.splitlines() == [f"run_tp8_cds16.sh: {wanted}, found {size}. Example: CHUNKED_PREFILL_SIZE=8192"]


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--page-size"], "no value"),
        (["--page-size="], "no value"),
        (["--page-size", "--log-level", "debug"], "--log-level"),
        (["--page-size=many"], "many"),
        (["--page-size", "0"], "0"),
        (["--page-size", "1000000"], "1000000"),
        (["--page-size", "99999999999999999999"], "99999999999999999999"),
        (["--page-size", "64", "--page-size"], "no value"),
    ],
)
def test_a_page_size_without_a_number_is_a_usage_error(
    tmp_path: Path, model: Path, args: list[str], found: str
) -> None:
    site = package(tmp_path, "nsa_prefill_backend")
    command, done = run(site, *args, model=model, MLAPATCH_DRY_RUN="")
    assert (done.returncode, command) == (2, [])
    wanted = "--page-size needs a whole number from 1 to 999999"
    assert done.stderr.splitlines() == [f"run_tp8_cds16.sh: {wanted}, found {found}. Example: --page-size 64"]


DEEP = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize("config", ["{", "[]", "\ud800", DEEP], ids=["cut", "list", "surrogate", "deep"])
def test_a_config_that_is_no_json_is_said_in_one_line(tmp_path: Path, model: Path, config: str) -> None:
    (model / "config.json").write_text(config, errors="surrogatepass")
    command, done = run(package(tmp_path, "nsa_prefill_backend"), model=model, MLAPATCH_DRY_RUN="")
    assert (done.returncode, command) == (5, [])
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"run_tp8_cds16.sh: {model}/config.json is no JSON: ")


def test_what_a_site_prints_is_no_answer(tmp_path: Path, model: Path) -> None:
    site = package(tmp_path, "nsa_prefill_backend")
    (site / "sitecustomize.py").write_text("print('welcome to this site')\n")
    command, done = run(site, model=model)
    assert options(command)["--nsa-prefill-backend"] == "trtllm", done.stderr


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    done = subprocess.run([str(SHELLCHECK), str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------------------------------- real argument checks
def resolve(site: Path, capability: int, *sets: list[str]) -> list[dict[str, Any]]:
    """What each list of arguments resolves to in this release, or its error."""
    # -B: the unpacked wheel is shared, and nothing is written in it.
    command = [sys.executable, "-B", str(HARNESS), str(site), str(capability), json.dumps(sets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.verify
@pytest.mark.parametrize(("version", "capability"), [*((v, 120) for v in RELEASES), ("0.5.15.post1", 90)])
def test_arguments_pass_the_real_checks(
    version: str, capability: int, model: Path, release: Callable[[str], Path]
) -> None:
    for needed in ("torch", "triton", "msgspec", "dill", "pydantic"):
        pytest.importorskip(needed)
    site = release(version)
    command, _ = run(site, model=model, NUM_CONTINUOUS_DECODE_STEPS="4")
    unrounded, _ = run(site, "--chunked-prefill-size", "16", model=model)
    found, refused = resolve(site, capability, command[3:], unrounded[3:])
    # What the rounding is for; it also proves that the checks run.
    assert refused == {"error": "AssertionError: chunked_prefill_size must be divisible by page_size"}
    resolved = found["resolved"]
    assert resolved["page_size"] == 64
    assert int(resolved["chunked_prefill_size"]) == 64
    assert resolved["attention_backend"] == "flashinfer"
    assert resolved["kv_cache_dtype"] == "fp8_e4m3"
    assert resolved["moe_runner_backend"] == "flashinfer_cutlass"
    assert (resolved["tp_size"], resolved["port"], resolved["num_continuous_decode_steps"]) == (8, 8000, 4)
    assert resolved["mem_fraction_static"] == 0.92
    assert (resolved["dsa_prefill"], resolved["dsa_decode"]) == ("trtllm", "trtllm")
