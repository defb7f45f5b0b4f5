"""A server that behaves like SGLang from outside: its phases' real log lines, its processes, its `/health`.

Several rank processes titled `sglang::scheduler_TP<k>` replay the lines of a real healthy start at speed. The parent
waits for them rank by rank in a blocking read, as 0.5.9 does (so a killed rank > 0 leaves it waiting for ever), binds
HTTP when all are ready, answers `/health` with 503 until its own warm-up request is through and with 200 after it.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

DATA = Path(__file__).parent / "data"
HEALTHY = DATA / "healthy-0.5.15.post1.log"
RECORD = re.compile(r"^\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\] ")
BEGINS = {
    "distributed-init": "Init torch distributed begin",
    "weights": "Load weight begin",
    "kv-pool": "Load weight end",
    "graph-capture": "Capture target decode CUDA graph begin",
    "warm-up": "max_total_num_tokens=",
}
STEP = 0.002


def say(text: str, rank: str | None = None) -> None:
    """One record, in one write, as SGLang's logging does."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(2, f"[{stamp}{f' {rank}' if rank else ''}] {text}\n".encode())


def scheduler_lines() -> list[str]:
    """The real scheduler's own lines, from the distributed init to the last one before HTTP."""
    lines = HEALTHY.read_text("utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if "Init torch distributed begin" in line)
    last = next(i for i, line in enumerate(lines) if "Started server process" in line)
    return [RECORD.sub("", line) for line in lines[first:last] if not line.startswith(" ")]


def act(how: str, rank: str | None) -> None:
    """Die or hang as asked."""
    if how == "hang":
        while True:
            time.sleep(60)
    if how in ("kill", "segv", "abort"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}[how])
    if how == "exit":
        os._exit(3)
    if how == "oom":
        error = (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of "
            "94.97 GiB of which 210.19 MiB is free."
        )
    else:
        error = "ZeroDivisionError: nobody has described this"
    frames = (
        '  File "/x/sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process\n    scheduler = Scheduler('
    )
    say(f"Scheduler hit an exception: Traceback (most recent call last):\n{frames}\n{error}\n", rank)
    os.kill(os.getppid(), signal.SIGQUIT)
    time.sleep(60)


def run_rank(args: argparse.Namespace) -> None:
    """One scheduler process; a line on stdout tells the parent that it is ready."""
    rank = f"TP{args.as_rank}" if args.tp > 1 else None
    mine = args.die_rank == args.as_rank
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    phase = "start"
    for line in scheduler_lines():
        phase = next((name for name, begin in BEGINS.items() if begin in line), phase)
        if phase == "warm-up" and args.as_rank != 0:
            break
        say(line, rank)
        if args.mark and "Load weight begin" in line and args.as_rank != args.unmarked:
            path, sha = args.mark
            say(f"mlapatch: active-cast active in {path} sha256={sha}", rank)
        if mine and phase == args.die_in:
            act(args.die_how, rank)
        time.sleep(STEP)
    os.write(1, b"ready\n")
    os.close(1)
    if args.compile and args.as_rank == 0:
        compile_something(args.compile)
    if mine and args.die_in == "warm-up":
        time.sleep(0.1)
        act(args.die_how, rank)
    ready = Path(args.ready_file)
    while not ready.exists():
        time.sleep(0.02)
    if mine and args.die_in == "ready":
        time.sleep(0.3)
        act(args.die_how, rank)
    while True:
        time.sleep(60)


def compile_something(seconds: float) -> None:
    """Four silent children called nvcc, one after the other."""
    link = Path(os.environ["FAKE_TMP"]) / "nvcc"
    link.symlink_to("/bin/sleep")
    for _ in range(4):
        subprocess.run([str(link), str(seconds)], check=False)


class Handler(http.server.BaseHTTPRequestHandler):
    """`/health` and `/generate` as SGLang answers them."""

    args: argparse.Namespace
    up = threading.Event()

    def do_GET(self) -> None:
        code = 200 if self.up.is_set() and not self.args.never_healthy else 503
        self._answer(code, {})
        words = "200 OK" if code == 200 else "503 Service Unavailable"
        say(f'INFO:     127.0.0.1:46384 - "GET {self.path} HTTP/1.1" {words}')

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size))
        if self.args.api_key and self.headers.get("Authorization") != f"Bearer {self.args.api_key}":
            self._answer(401, {"error": "Unauthorized"})
            return
        text, ids = {
            "good": (" Paris. It is known for its museums.", [12, 7, 99, 4, 5]),
            "repeats": ("!!!!!!!!!!!!!!!!", [0] * 16),
            "one-token": (" ", [7]),
        }[self.args.answer]
        answer = {"output_ids": ids, "meta_info": {"completion_tokens": len(ids)}}
        self._answer(200, answer if "input_ids" in body else {"text": text, **answer})

    def _answer(self, code: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """SGLang logs requests itself."""


def run_parent(args: argparse.Namespace) -> None:
    """Start the ranks, wait for each in turn, bind, warm up, serve."""
    children: list[subprocess.Popen[bytes]] = []

    def quit_all(number: int, frame: object) -> None:
        if number == signal.SIGQUIT:
            say("Received sigquit from a child process. It usually means the child failed.")
        else:
            say("Gracefully exiting... Remaining number of requests 0. Remaining requests [].")
        for child in children:
            child.kill()
        os._exit(131 if number == signal.SIGQUIT else 0)

    signal.signal(signal.SIGQUIT, quit_all)
    signal.signal(signal.SIGTERM, quit_all)
    if args.die_in == "start":
        if args.die_how == "argument":
            os.write(
                2, b"usage: launch_server.py\nlaunch_server.py: error: unrecognized arguments: --nsa-prefill-backend\n"
            )
            sys.exit(2)
        act(args.die_how, None)
    settings = f"port={args.port}, nnodes={args.nnodes}, node_rank={args.node_rank}, tp_size={args.tp}, pp_size=1"
    settings += f", api_key={args.api_key!r}, mem_fraction_static=0.92"
    say(f"server_args=ServerArgs(model_path='/models/glm', {settings})")
    here = args.tp // args.nnodes
    for rank in range(here * args.node_rank, here * (args.node_rank + 1)):
        title = f"sglang::scheduler_TP{rank}" if args.tp > 1 else "sglang::scheduler"
        command = [title, __file__, *sys.argv[1:], "--as-rank", str(rank)]
        children.append(subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE))
    for child in children:
        assert child.stdout is not None
        if child.stdout.readline() != b"ready\n":
            while True:  # a rank was killed without a word; 0.5.9's parent waits for ever where it was not rank 0
                time.sleep(60)
    Handler.args = args
    if args.node_rank:
        stand_in(args)
    say("INFO:     Started server process [1]")
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    except OSError:
        where = f"('127.0.0.1', {args.port})"
        say(f"ERROR:    [Errno 98] error while attempting to bind on address {where}: address already in use")
        for child in children:
            child.kill()
        sys.exit(1)
    say(f"INFO:     Uvicorn running on http://127.0.0.1:{args.port} (Press CTRL+C to quit)")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(args.warm_up)
    if args.die_in == "warm-up" and args.die_rank == -1:
        act(args.die_how, None)
    if not args.never_healthy:
        Handler.up.set()
        say("The server is fired up and ready to roll!")
        Path(args.ready_file).touch()
    if args.die_in == "ready" and args.die_rank == -1:
        time.sleep(0.3)
        act(args.die_how, None)
    while True:
        time.sleep(60)


def stand_in(args: argparse.Namespace) -> None:
    """What a node other than the first does: `launch_dummy_health_check_server`, without a log or a model."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Health).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--die-in", default="")
    parser.add_argument("--die-how", default="exception")
    parser.add_argument("--die-rank", type=int, default=0, help="-1: the parent itself")
    parser.add_argument("--answer", default="good")
    parser.add_argument("--never-healthy", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--warm-up", type=float, default=0.05)
    parser.add_argument("--compile", type=float, default=0.0)
    parser.add_argument("--mark", nargs=2, metavar=("PATH", "SHA256"))
    parser.add_argument("--unmarked", type=int, default=-1)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--as-rank", type=int)
    args, _ = parser.parse_known_args()
    args.ready_file = str(Path(os.environ["FAKE_TMP"]) / "ready")
    if args.as_rank is None:
        run_parent(args)
    else:
        run_rank(args)


if __name__ == "__main__":
    main()
