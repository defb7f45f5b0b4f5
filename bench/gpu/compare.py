#!/usr/bin/env python3
"""Patches on a real SGLang server on one Hopper GPU: same machine, same run, same prompts, outputs compared with stock.

    python3 bench/gpu/compare.py --out DIR stock active-cast gather-cast triton fp8-plan

Needs the unpacked payload of bench/gpu/README.md (/tmp/site, /tmp/flashinfer, /tmp/model, /tmp/model-dsa); standard
library only. Writes DIR/compare.json after every variant, so a run that is cut keeps what it measured; a second run
with the same DIR adds to it. bench/gpu/table.py turns the file into the README's table.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PORT = 30011
SITE = Path("/tmp/site")
REPOSITORY = Path(__file__).resolve().parents[2]
NEW_TOKENS = 128
LENGTHS = (512, 8192, 65536)
PREFIX_HIT = 9216
STREAMS = 16


@dataclass(frozen=True)
class Variant:
    """One server: the patch that is applied, and what else differs from the common arguments."""

    patch: str = ""
    args: tuple[str, ...] = ()
    backend: str = "flashinfer"
    flashinfer: bool = False  # use /tmp/flashinfer (0.6.18) instead of the payload's 0.6.12
    model: str = "/tmp/model"
    page_size: int = 1
    lengths: tuple[int, ...] = LENGTHS
    streams: int = STREAMS
    compare_with: str = "stock"


DSA = ("--dsa-prefill-backend", "trtllm", "--dsa-decode-backend", "trtllm")
EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
EAGER = ("--disable-cuda-graph",)
SHORT = (512, 8192)
VARIANTS = {
    "stock": Variant(),
    "active-cast": Variant("active-cast"),
    "gather-cast": Variant("gather-cast"),
    "fused-decode": Variant("fused-decode"),
    "triton": Variant(backend="triton"),
    "fp8-plan": Variant("fp8-plan", flashinfer=True),
    "gather-cast-eager": Variant("gather-cast", args=EAGER, lengths=SHORT, streams=0),
    "dsa-stock": Variant(model="/tmp/model-dsa", page_size=64, args=DSA, lengths=SHORT, streams=0),
    "dsa-active-cast": Variant(
        "active-cast", model="/tmp/model-dsa", page_size=64, args=DSA, lengths=SHORT, streams=0, compare_with="dsa-stock"
    ),
    "dsa-gather-cast": Variant(
        "gather-cast", model="/tmp/model-dsa", page_size=64, args=DSA, lengths=SHORT, streams=0, compare_with="dsa-stock"
    ),
    "eagle-stock": Variant(model="/tmp/model-nextn", args=EAGLE, lengths=SHORT, streams=0),
    "eagle-active-cast": Variant(
        "active-cast", model="/tmp/model-nextn", args=EAGLE, lengths=SHORT, streams=0, compare_with="eagle-stock"
    ),
}


@dataclass
class Server:
    """A running server's process and log."""

    process: subprocess.Popen[bytes]
    log: Path
    seconds: float = 0.0
    ready: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def mlapatch(*args: str) -> dict[str, Any]:
    """Run a verb on the payload's SGLang and return its JSON."""
    command = [sys.executable, "-m", "mlapatch", *args, "--sglang", str(SITE), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return dict(json.loads(done.stdout))


def environment(*, flashinfer: bool = False) -> dict[str, str]:
    path = [str(REPOSITORY / "src"), "/tmp/extra", str(SITE), str(SITE / "nvidia_cutlass_dsl/python_packages")]
    if flashinfer:
        path.insert(0, "/tmp/flashinfer")
    return {
        **os.environ,
        "PYTHONPATH": ":".join(path),
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def start(name: str, variant: Variant, out: Path, wait: float) -> Server:
    """Start a server and wait until /health answers 200, the process ends, or `wait` seconds are over."""
    log = out / f"server-{name}.log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", variant.model, "--load-format", "dummy"),
        *("--skip-tokenizer-init", "--attention-backend", variant.backend, "--kv-cache-dtype", "fp8_e4m3"),
        *("--max-total-tokens", "495552", "--page-size", str(variant.page_size), "--grammar-backend", "none"),
        *("--sampling-backend", "pytorch", "--host", "127.0.0.1", "--port", str(PORT), "--cuda-graph-max-bs", "16"),
        *("--context-length", "200000", "--chunked-prefill-size", "8192", *variant.args),
    ]
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment(flashinfer=variant.flashinfer), stdout=file, stderr=file, start_new_session=True
        )
    server = Server(process, log)
    while time.monotonic() - began < wait and process.poll() is None and not server.ready:
        server.ready = health() == 200
        time.sleep(0.5)
    server.seconds = round(time.monotonic() - began, 1)
    server.facts = facts_in(log)
    return server


def health() -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def stop(server: Server) -> None:
    try:
        os.killpg(server.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    server.process.wait()
    deadline = time.monotonic() + 20
    while health() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)


def facts_in(log: Path) -> dict[str, Any]:
    """What the log says of the pool, the graphs, and of mlapatch."""
    facts: dict[str, Any] = {"mlapatch": [], "accept_len": []}
    for line in log.read_text(errors="replace").splitlines():
        if "mlapatch:" in line:
            facts["mlapatch"].append(line.strip()[-300:])
        if "KV Cache is allocated" in line or "max_total_num_tokens=" in line:
            facts["pool"] = line.strip()[-200:]
        if "accept len:" in line:
            facts["accept_len"].append(float(line.split("accept len:")[1].split(",")[0]))
    return facts


def generate(input_ids: list[int], new: int) -> tuple[list[float], list[int]]:
    """One greedy streamed generation: arrival time of each chunk (s), output token ids."""
    body = {
        "input_ids": input_ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times: list[float] = []
    ids: list[int] = []
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data:") and "[DONE]" not in text:
                times.append(time.perf_counter())
                ids = json.loads(text[5:]).get("output_ids") or ids
    return times, ids


def measure(variant: Variant) -> dict[str, Any]:
    """TPOT at each length, a prefix hit, concurrent streams with a shared prefix; greedy outputs of each."""
    rng = random.Random(0)
    prompts = {length: [rng.randrange(10, 31000) for _ in range(length)] for length in LENGTHS}
    prefix = [rng.randrange(10, 31000) for _ in range(4096)]
    tails = [[rng.randrange(10, 31000) for _ in range(64)] for _ in range(STREAMS)]
    hit = [rng.randrange(10, 31000) for _ in range(PREFIX_HIT + 96)]
    result: dict[str, Any] = {"single": {}, "outputs": {}}
    for length in variant.lengths:
        generate(prompts[length], 8)
        began = time.perf_counter()
        times, ids = generate(prompts[length], NEW_TOKENS)
        tpot = (times[-1] - times[0]) / (len(ids) - 1)
        result["single"][str(length)] = {"ttft_ms": 1e3 * (times[0] - began), "tpot_ms": 1e3 * tpot}
        result["outputs"][str(length)] = ids
    generate(hit[:PREFIX_HIT], 4)
    result["outputs"]["prefix-hit"] = generate(hit, 32)[1]
    if variant.streams:
        generate(prefix, 8)
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(variant.streams) as pool:
            done = list(pool.map(lambda tail: generate(prefix + tail, NEW_TOKENS), tails))
        elapsed = time.perf_counter() - began
        result["streams"] = {"count": variant.streams, "tok_s": variant.streams * NEW_TOKENS / elapsed}
        for index, (_, ids) in enumerate(done):
            result["outputs"][f"stream-{index}"] = ids
    return result


def agreement(outputs: dict[str, list[int]], reference: dict[str, list[int]]) -> dict[str, Any]:
    """How many outputs equal the reference's, and where each other one first differs."""
    common = [name for name in outputs if name in reference]
    differing = {}
    for name in common:
        if outputs[name] != reference[name]:
            pairs = zip(outputs[name], reference[name], strict=False)
            differing[name] = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
    return {"equal": len(common) - len(differing), "compared": len(common), "first_difference": differing}


def machine() -> dict[str, Any]:
    """Where this ran."""
    code = (
        "import json, torch, triton; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'gpu': p.name, 'memory': p.total_memory, 'torch': torch.__version__, 'triton': triton.__version__}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "python": sys.version.split()[0]}


def commit() -> str:
    git = ["git", "-c", "safe.directory=*", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("MLAPATCH_COMMIT", "")


def run(name: str, out: Path, kept: dict[str, Any], wait: float, during: list[str]) -> None:
    variant = VARIANTS[name]
    mlapatch("revert")
    if variant.patch:
        mlapatch("apply", variant.patch, "--force")
    status = mlapatch("status")
    server = start(name, variant, out, wait)
    entry: dict[str, Any] = {"ready": server.ready, "start_s": server.seconds, "args": list(variant.args)}
    try:
        if server.ready:
            entry.update(measure(variant))
            for command in during:
                print(f"{name}: {command}", flush=True)
                done = subprocess.run(command, shell=True, env=environment(flashinfer=variant.flashinfer), check=False)
                entry.setdefault("during", {})[command] = done.returncode
    except (OSError, ValueError, IndexError) as error:
        entry["error"] = f"{type(error).__name__}: {error}"
    finally:
        stop(server)
    entry["facts"] = facts_in(server.log)
    entry["patch"] = {
        "name": variant.patch,
        "sha256": status["targets"][0]["sha256"],
        "digest": status["digest"],
        "sglang": status["sglang"]["version"],
        "flashinfer": "0.6.18" if variant.flashinfer else status["sglang"]["flashinfer"],
        "backend": variant.backend,
    }
    reference = kept["variants"].get(variant.compare_with, {}).get("outputs")
    if reference and "outputs" in entry:
        entry["agreement"] = agreement(entry["outputs"], reference)
    kept["variants"][name] = entry
    report(name, entry)
    if not server.ready or "error" in entry:
        print("\n".join(server.log.read_text(errors="replace").splitlines()[-25:]), flush=True)


def report(name: str, entry: dict[str, Any]) -> None:
    single = " ".join(f"{length}:{value['tpot_ms']:.2f}ms" for length, value in entry.get("single", {}).items())
    streams = f"{entry['streams']['tok_s']:.0f}tok/s" if "streams" in entry else ""
    equal = entry.get("agreement", {})
    print(
        f"{name}: ready={entry['ready']} start={entry['start_s']}s {single} {streams} "
        f"equal={equal.get('equal')}/{equal.get('compared')} {equal.get('first_difference', '')} "
        f"accept={entry['facts']['accept_len'][-3:]} {entry.get('error', '')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a compare.json to add to")
    parser.add_argument("--budget", type=float, default=560, help="seconds; no variant starts with less than --reserve left")
    parser.add_argument("--reserve", type=float, default=90)
    parser.add_argument("--wait", type=float, default=330, help="seconds to wait for a server")
    parser.add_argument("--during", action="append", default=[], metavar="VARIANT=COMMAND", help="run while it is up")
    args = parser.parse_args()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    source = args.resume if args.resume and args.resume.exists() else args.out / "compare.json"
    kept = json.loads(source.read_text()) if source.exists() else {"variants": {}}
    kept.update(machine=machine(), commit=commit(), date=time.strftime("%Y-%m-%d"), pool_tokens=495552, layers=78)
    for name in args.variants:
        left = args.budget - (time.monotonic() - began)
        if left < args.reserve:
            print(f"{name}: not run, {left:.0f} s left", flush=True)
            continue
        during = [item.partition("=")[2] for item in args.during if item.partition("=")[0] == name]
        run(name, args.out, kept, min(args.wait, left), during)
        (args.out / "compare.json").write_text(json.dumps(kept, indent=1))
    mlapatch("revert")


if __name__ == "__main__":
    main()
