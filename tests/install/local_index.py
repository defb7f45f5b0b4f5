"""A package index of small SGLang-like wheels on this machine, over HTTP, that can misbehave."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import os
import shutil
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BACKEND = "sglang/srt/layers/attention/flashinfer_mla_backend.py"


def find_uv() -> str | None:
    """uv beside this interpreter (a virtual environment need not be on PATH), else on PATH."""
    return shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def make_wheel(
    folder: Path,
    version: str,
    files: Mapping[str, bytes],
    *,
    tags: str = "py3-none-any",
    wrong: tuple[str, ...] = (),
    requires: tuple[str, ...] = ("torch==2.9.1",),
) -> Path:
    """Build a wheel; RECORD lies about the files named in `wrong`."""
    info = f"sglang-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {r}\n" for r in requires)
    members = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n{lines}\nText.\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n".encode(),
    }
    record = []
    for name, data in members.items():
        digest = hashlib.sha256(b"other" if name in wrong else data).digest()
        record.append(f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(data)}")
    members[f"{info}/RECORD"] = ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sglang-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@dataclass
class LocalIndex:
    """What the server does: `cut` sends only so many bytes of a wheel, `delay` waits between blocks.

    Wheels whose name contains a word of `held` do not come to an end until they are let go.
    """

    folder: Path
    url: str = ""
    cut: int | None = None
    delay: float = 0.0
    held: tuple[str, ...] = ()
    served: list[str] = field(default_factory=list)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[LocalIndex]:
    """Serve the wheels of `folder` as a simple index on the loopback interface."""
    index = LocalIndex(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            if name.endswith(".whl"):
                self._send_wheel((folder / name).read_bytes(), name)
                return
            links = "".join(f'<a href="/files/{p.name}">{p.name}</a>\n' for p in sorted(folder.glob("*.whl")))
            body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            self.send_response(200 if "/sglang/" in self.path else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_wheel(self, data: bytes, name: str) -> None:
            index.served.append(name)
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            body = data if index.cut is None else data[: index.cut]
            with contextlib.suppress(OSError):
                for start in range(0, len(body), 65536):
                    while any(word in self.path for word in index.held):
                        time.sleep(0.05)
                    self.wfile.write(body[start : start + 65536])
                    self.wfile.flush()
                    time.sleep(index.delay)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
