"""A small server that streams as SGLang or an OpenAI endpoint does, at a known pace."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.measure.synthetic import Scene


@dataclass
class Behaviour:
    """How it answers. `pieces` cuts each write into that many, as a network does; `ranks` is for profiles."""

    api: str = "sglang"
    version: str = "0.5.15.post1"
    ttft: float = 0.02
    tpot: float = 0.004
    stream_interval: int = 1
    text: bool = True
    usage: bool = True
    refuse_stream_options: bool = False
    stop_after: int | None = None
    fail: int = 0
    fail_after: int | None = None
    pieces: int = 1
    pool: int | None = 495_552
    cached: int = 0
    old_paths: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    busy_profile: bool = False
    write_traces: bool = True
    needs_load: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    stopped: int = 0
    tokens_served: int = 0


@contextmanager
def serve(behaviour: Behaviour) -> Iterator[str]:
    """The server's URL."""

    class Handler(_Handler):
        how = behaviour

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    how: Behaviour
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Facts about the server."""
        how = self.how
        prefix = "/get_" if how.old_paths else "/"
        if how.api == "sglang" and self.path == prefix + "server_info":
            info = {"version": how.version, "tp_size": how.ranks, "api_key": "secret", "disable_cuda_graph": False}
            info |= {"stream_interval": how.stream_interval, "attention_backend": "flashinfer", **how.info}
            self._json(info | ({"max_total_num_tokens": how.pool} if how.pool else {}))
        elif how.api == "sglang" and self.path == prefix + "model_info":
            self._json({"model_path": "/models/glm"})
        elif self.path == "/v1/models":
            self._json({"data": [{"id": "glm"}]})
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        """Generate, or profile."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/generate":
            self.how.requests.append(body)
            self._stream(body["sampling_params"]["max_new_tokens"], self._sglang)
        elif self.path == "/v1/completions":
            if self.how.refuse_stream_options and "stream_options" in body:
                self._json({"error": "unknown field stream_options"}, 400)
                return
            self.how.requests.append(body)
            self._stream(body["max_tokens"], self._openai)
        elif self.path == "/start_profile":
            self._start_profile(body)
        elif self.path == "/stop_profile":
            self.how.stopped += 1
            self._json("Stop profiling.")
        else:
            self._json("ok")

    def _stream(self, count: int, chunk: Any) -> None:
        how = self.how
        if how.fail or (how.fail_after is not None and len(how.requests) > how.fail_after):
            how.fail = max(how.fail - 1, 0)
            self._json({"error": {"message": "out of memory"}}, 500)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = min(count, how.stop_after) if how.stop_after is not None else count
        with contextlib.suppress(ConnectionError):
            for number in range(1, count + 1):
                time.sleep(how.ttft if number == 1 else how.tpot)
                interval = how.stream_interval
                if number in (1, count) or interval == 1 or number % interval == 1:
                    self._write(b"data: " + json.dumps(chunk(number, number == count)).encode() + b"\n\n")
            if how.api == "openai" and how.usage:
                usage = {"prompt_tokens": 7, "completion_tokens": count}
                self._write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            self._write(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        how.tokens_served += count

    def _write(self, data: bytes) -> None:
        size = max(1, -(-len(data) // self.how.pieces))
        for begin in range(0, len(data), size):
            piece = data[begin : begin + size]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()

    def _sglang(self, number: int, last: bool) -> dict[str, Any]:
        meta = {"prompt_tokens": 7, "completion_tokens": number, "cached_tokens": self.how.cached}
        meta["finish_reason"] = {"type": "length"} if last else None  # type: ignore[assignment]
        if self.how.text:
            return {"text": "é" * number, "meta_info": meta}
        return {"output_ids": list(range(number)), "meta_info": meta}

    def _openai(self, number: int, last: bool) -> dict[str, Any]:
        choice = {"index": 0, "text": "x", "finish_reason": "length" if last else None}
        usage = {"prompt_tokens": 7, "completion_tokens": number} if self.how.usage else None
        return {"choices": [choice], "usage": usage}

    def _start_profile(self, body: dict[str, Any]) -> None:
        how = self.how
        if how.busy_profile:
            self._json({"error": "RuntimeError: Profiling is already in progress. Call /stop_profile first."}, 500)
            return
        how.profiles.append(body)
        self._json("Start profiling.")
        if how.write_traces:
            threading.Thread(target=self._traces, args=(body, how.tokens_served), daemon=True).start()

    def _traces(self, body: dict[str, Any], served: int) -> None:
        """Write each rank's file once a load came, slowly, as a scheduler does."""
        how = self.how
        until = time.monotonic() + 20
        while how.needs_load and how.tokens_served == served and time.monotonic() < until:
            time.sleep(0.02)
        folder = Path(body["output_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(how.ranks):
            draft = Scene(steps=int(body.get("num_steps") or 5), layers=8).write(folder / f"draft{rank}.json")
            data = gzip.compress(draft.read_bytes(), 1)
            draft.unlink()
            name = f"{body.get('profile_prefix') or ''}-17.5-TP-{rank}.trace.json.gz".lstrip("-")
            with (folder / name).open("wb") as file:
                half = len(data) // 2
                file.write(data[:half])
                file.flush()
                time.sleep(0.1)
                file.write(data[half:])
