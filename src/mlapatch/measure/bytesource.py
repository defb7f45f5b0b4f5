"""Bytes of a trace file in blocks of bounded size, gzip or plain, with what went wrong at its end."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, BinaryIO

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK = 1 << 20
_GZIP = b"\x1f\x8b"


class ByteSource:
    """Iterate the decompressed bytes of `path` in blocks of at most 1 MiB.

    `damage` says afterwards why the bytes stop early (a truncated or corrupt gzip stream), or is empty.
    `progress` is called with the number of bytes taken from the file since the last call.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self.path = path
        self.damage = ""
        self.bytes_out = 0
        self._progress = progress

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                magic = file.read(2)
                file.seek(0)
                yield from self._inflate(file) if magic == _GZIP else self._plain(file)
        except OSError as error:
            raise MlapatchError(
                Exit.USAGE,
                "cannot read the trace",
                where=str(self.path),
                found=error.strerror or str(error),
                next="traces are on the server's file system: inside its container, if it runs in one",
            ) from None

    def _take(self, file: BinaryIO, size: int) -> bytes:
        block = file.read(size)
        if self._progress is not None:
            self._progress(len(block))
        return block

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        while block := self._take(file, BLOCK):
            self.bytes_out += len(block)
            yield block

    def _inflate(self, file: BinaryIO) -> Iterator[bytes]:
        inflater = zlib.decompressobj(wbits=31)
        pending = b""
        while True:
            if not pending:
                pending = self._take(file, 1 << 18)
                if not pending:
                    break
            try:
                block = inflater.decompress(pending, BLOCK)
            except zlib.error as error:
                self.damage = f"the gzip stream is damaged after {self.bytes_out:,} bytes ({error})"
                return
            self.bytes_out += len(block)
            if block:
                yield block
            if inflater.eof:  # members may follow each other; zero padding after the last one is legal
                pending = inflater.unused_data.lstrip(b"\0") or self._take(file, 1 << 18).lstrip(b"\0")
                if not pending:
                    return
                inflater = zlib.decompressobj(wbits=31)
            else:
                pending = inflater.unconsumed_tail
        self.damage = f"the gzip stream ends early, after {self.bytes_out:,} bytes"
