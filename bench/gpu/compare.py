#!/usr/bin/env python3
"""Patches on a real SGLang server on one Hopper GPU: same machine, same run, same prompts, outputs compared with stock.

    python3 bench/gpu/compare.py --out DIR stock,active-cast,gather-cast,triton fp8-plan,dsa-stock,dsa-active-cast

The variants of a group start side by side (a start is mostly imports on the CPU), each from its own copy of the
package; then one is measured at a time while the others are stopped (SIGSTOP). Needs the unpacked payload of
bench/gpu/README.md (/tmp/site, /tmp/flashinfer, /tmp/model, /tmp/model-dsa); standard library only. Writes
DIR/compare.json after every variant, so a run that is cut keeps what it measured. With --weights attention outputs
depend on what attention computes (dummy_weights.py), and each output that differs is told with the log-probabilities
of both tokens. bench/gpu/table.py turns the file into the README's table.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from copies import REPOSITORY, SAID, SITE, WEIGHTS, copy_of, environment, mlapatch, own_copy
from differences import agreement, by_load, explained, ids, in_words, margins, summary
from greedy import Prompts, ending_scores, scores, timed
from variants import VARIANTS, Variant

FIRST_PORT, PORT_STEP = 30011, 1500
AGREEMENTS = ("agreement", "scored_agreement")
FP32_HEAD = ("--enable-fp32-lm-head",)  # BF16 logits lie 1/16 apart: ties everywhere


@dataclass
class Server:
    """A running server's process and log."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    began: float
    seconds: float = 0.0
    ready: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def more(args: argparse.Namespace) -> tuple[str, ...]:
    """Arguments of all servers of this run."""
    return FP32_HEAD if args.weights != "dummy" else ()


def start(name: str, variant: Variant, site: Path, out: Path, port: int, more: tuple[str, ...]) -> Server:
    """Start a server in a process group of its own."""
    log = out / f"server-{name}.log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", variant.model, "--load-format", "dummy"),
        *("--skip-tokenizer-init", "--attention-backend", variant.backend, "--kv-cache-dtype", "fp8_e4m3"),
        *("--max-total-tokens", "495552", "--page-size", str(variant.page_size), "--grammar-backend", "none"),
        *("--sampling-backend", "pytorch", "--host", "127.0.0.1", "--port", str(port), "--cuda-graph-max-bs", "16"),
        *(
            "--context-length",
            "200000",
            "--chunked-prefill-size",
            "8192",
            "--mem-fraction-static",
            "0.96",
        ),
        *variant.args,
        *more,
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment(site, flashinfer=variant.flashinfer),
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd="/tmp",
        )
    return Server(process, log, port, time.monotonic())


def wait_for(servers: list[Server], seconds: float) -> None:
    """Until each server answers /health with 200 or has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    waiting = list(servers)
    while waiting and time.monotonic() < deadline:
        for server in list(waiting):
            server.ready = health(server.port) == 200
            server.seconds = round(time.monotonic() - server.began, 1)
            if server.ready or server.process.poll() is not None:
                waiting.remove(server)
        time.sleep(0.5)


def health(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextlib.contextmanager
def only(server: Server, servers: Iterable[Server]) -> Iterator[None]:
    """The others stand still meanwhile: an idle scheduler polls, and takes a CPU core from the one that is measured."""
    others = [other for other in servers if other is not server and other.process.poll() is None]
    for other in others:
        os.killpg(other.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            os.killpg(other.process.pid, signal.SIGCONT)


def stop(server: Server) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


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


def machine() -> dict[str, Any]:
    """Where this ran."""
    code = (
        "import json, torch, triton; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'gpu': p.name, 'memory': p.total_memory, 'torch': torch.__version__, "
        "'triton': triton.__version__}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(SITE), capture_output=True, text=True, check=True
    )
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "python": sys.version.split()[0]}


def commit() -> str:
    git = ["git", "-c", "safe.directory=*", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return os.environ.get("MLAPATCH_COMMIT") or done.stdout.strip() or "unknown"


def run(names: list[str], out: Path, kept: dict[str, Any], args: argparse.Namespace) -> None:
    """Patch and start a group, then measure its servers one at a time."""
    servers: dict[str, Server] = {}
    statuses = {}
    try:
        for index, name in enumerate(names):
            variant, site = VARIANTS[name], own_copy(name, args.weights)
            where = ["--patches", str(variant.patches)] if variant.patches else []
            mlapatch(site, "revert", *where)
            if variant.patch:
                mlapatch(site, "apply", variant.patch, "--force", *where)
            statuses[name] = mlapatch(site, "status", *where)
            port = FIRST_PORT + PORT_STEP * index
            servers[name] = start(name, variant, site, out, port, more(args))
        wait_for(list(servers.values()), args.wait)
        time.sleep(3)  # the last warm-up request is over: from here on one server works at a time
        for name, server in servers.items():
            with only(server, servers.values()):
                kept["variants"][name] = result(name, server, statuses[name], kept, args)
            (out / "compare.json").write_text(json.dumps(kept, indent=1))
            report(name, kept["variants"][name])
            if not server.ready or "error" in kept["variants"][name]:
                print("\n".join(server.log.read_text(errors="replace").splitlines()[-25:]), flush=True)
    finally:
        for server in servers.values():
            stop(server)


def result(
    name: str, server: Server, status: dict[str, Any], kept: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """What one server did."""
    variant = VARIANTS[name]
    entry: dict[str, Any] = {"ready": server.ready, "start_s": server.seconds, "args": [*variant.args, *more(args)]}
    entry["commit"], entry["weights"] = kept["commit"], args.weights
    if server.ready and args.weights != "dummy" and SAID not in server.log.read_text(errors="replace"):
        entry["error"] = f"the log does not say '{SAID}': these are other weights"
    elif server.ready:
        try:
            began = time.monotonic()
            load = (server.port, Prompts.seeded(), variant.lengths, variant.streams)
            if not args.untimed:
                entry.update(timed(*load))
            # SGLang's own dummy weights give every token the log-probability of a uniform choice.
            if args.untimed or args.weights != "dummy":
                first = scores(*load)
                entry["scores"] = first | ending_scores(*load[:3])
                # The same server again: how far apart equal computations are.
                entry["apart_from_itself"] = by_load(scores(*load), first)
            entry["measured_s"] = round(time.monotonic() - began, 1)
        except (OSError, ValueError, LookupError, ArithmeticError, TypeError, http.client.HTTPException) as error:
            entry["error"] = f"{type(error).__name__}: {error}"
        for command in (item.partition("=")[2] for item in args.during if item.partition("=")[0] == name):
            ready = command.replace("PORT", str(server.port))
            site = copy_of(name, args.weights)
            done = subprocess.run(ready, shell=True, env=environment(site, flashinfer=variant.flashinfer), check=False)
            entry.setdefault("during", {})[ready] = done.returncode
    entry["facts"] = facts_in(server.log)
    entry["patch"] = {
        "name": variant.patch,
        "sha256": status["targets"][0]["sha256"],
        "digest": status["digest"],
        "sglang": status["sglang"]["version"],
        "flashinfer": "0.6.18" if variant.flashinfer else "0.6.12",
        "backend": variant.backend,
    }
    reference = kept["variants"].get(variant.compare_with, {})
    if reference.get("weights", "dummy") != args.weights:
        reference = {}
    if "outputs" in reference and "outputs" in entry:
        entry["agreement"] = agreement(entry["outputs"], reference["outputs"])
    if "scores" in reference and "scores" in entry and reference["scores"].keys() == entry["scores"].keys():
        entry["apart"] = by_load(entry["scores"], reference["scores"])
        entry["scored_agreement"] = agreement(ids(entry["scores"]), ids(reference["scores"]))
        entry["differences"] = explained(entry["scores"], reference["scores"])
        entry["margins"] = margins(entry["differences"])
    return entry


def report(name: str, entry: dict[str, Any]) -> None:
    single = " ".join(f"{length}:{value['tpot_ms']:.2f}ms" for length, value in entry.get("single", {}).items())
    streams = f"{entry['streams']['tok_s']:.0f}tok/s" if "streams" in entry else ""
    equal = [f"{entry[key]['equal']}/{entry[key]['compared']}" for key in AGREEMENTS if key in entry]
    print(
        f"{name}: ready={entry['ready']} start={entry['start_s']}s measured={entry.get('measured_s')}s "
        f"{single} {streams} equal={' '.join(equal)} {entry.get('agreement', {}).get('first_difference', '')} "
        f"accept={entry['facts']['accept_len'][-3:]} {entry.get('error', '')}",
        *(f"  {key} {summary(entry[key])}" for key in ("apart", "apart_from_itself") if key in entry),
        f"  differing {entry.get('margins')}",
        *(f"  {in_words(row)}" for row in entry.get("differences", [])[:12]),
        sep="\n",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="VARIANT[,VARIANT...]", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a compare.json to add to")
    parser.add_argument("--wait", type=float, default=330, help="seconds to wait for the servers of a group")
    parser.add_argument(
        "--during", action="append", default=[], metavar="VARIANT=COMMAND", help="after its measurement"
    )
    parser.add_argument("--untimed", action="store_true", help="only the log-probabilities of greedy tokens")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="dummy",
        help="attention: such that outputs depend on it (dummy_weights.py)",
    )
    args = parser.parse_args()
    unknown = {name for group in args.groups for name in group.split(",")} - VARIANTS.keys()
    if unknown:
        parser.error(f"no variant {', '.join(sorted(unknown))}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # what timeout sends: the servers must end too
        signal.signal(number, lambda *_: sys.exit(1))
    args.out.mkdir(parents=True, exist_ok=True)
    source = args.resume if args.resume and args.resume.exists() else args.out / "compare.json"
    kept = json.loads(source.read_text()) if source.exists() else {"variants": {}}
    kept.update(machine=machine(), commit=commit(), date=time.strftime("%Y-%m-%d"), pool_tokens=495552, layers=78)
    for group in args.groups:
        run(group.split(","), args.out, kept, args)


if __name__ == "__main__":
    main()
