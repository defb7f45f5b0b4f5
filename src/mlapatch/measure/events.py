"""Chrome-trace events out of a byte stream, in batches, whatever the file's size.

orjson parses whole documents only, so the stream is cut at event boundaries. Cutting relies on one fact: text that
starts at an element of the array and parses as `[` text `]` ends at an element of the same array. A cheap guess (the
last `}, {` of a block) is thus proven by the parse itself; where guesses fail, an exact scan of the text cuts.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import orjson

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Event = dict[str, Any]

_GUESS = re.compile(rb"\}\s*,\s*\{")
_MARK = re.compile(rb'["{}\[\],]')
_STRING_REST = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE = re.compile(rb"[\s,]*")
_KEY = re.compile(rb'\s*,?\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*(?=\S)', re.DOTALL)
_BATCH = 2 << 20
_LONGEST = 16 << 20  # one event, or one other top-level value, longer than this is not a trace
_KEPT = 1 << 20


class _Cut:
    """Incremental exact scanner: finds where values end at depth 0 of the container that the text is in."""

    def __init__(self) -> None:
        self.at = 0
        self.depth = 0

    def advance(self, text: bytes) -> tuple[int, bytes] | None:
        """Position and character of the next `,` or closing bracket at depth 0, or None: more text is needed."""
        while (mark := _MARK.search(text, self.at)) is not None:
            char = mark.group()
            if char == b'"':
                rest = _STRING_REST.match(text, mark.end())
                if rest is None:
                    self.at = mark.start()
                    return None
                self.at = rest.end()
                continue
            self.at = mark.end()
            if char in b"{[":
                self.depth += 1
            elif char == b",":
                if self.depth == 0:
                    return mark.start(), char
            elif self.depth == 0:
                return mark.start(), char
            else:
                self.depth -= 1
        self.at = len(text)
        return None


class EventReader:
    """Iterate batches of events; afterwards `meta` holds the small other keys, `notes` what was odd.

    Reads the object form (`{"traceEvents": [...], ...}`, keys in any order) and the array form.

    Raises:
        MlapatchError: this is not a Chrome trace (exit 2), or it is damaged beyond reading on.
    """

    def __init__(self, blocks: Iterable[bytes], where: str) -> None:
        self.meta: dict[str, Any] = {}
        self.notes: list[str] = []
        self.events = 0
        self.skipped = 0
        self.complete = False
        self._blocks = iter(blocks)
        self._where = where
        self._text = b""
        self._offset = 0
        self._found = False

    def __iter__(self) -> Iterator[list[Event]]:
        opening = self._opening()
        if opening == b"[":
            self._found = True
            yield from self._array()
        else:
            yield from self._object()
        if not self._found:
            raise self._not_a_trace(
                "a JSON object with a traceEvents array" if self.complete else "traceEvents before the file ends"
            )
        if not self.complete:
            self.notes.append(f"the file ends inside the trace, after event {self.events:,}: figures are partial")
        if self.skipped:
            self.notes.append(f"{self.skipped:,} events are not valid JSON and were left out")

    def _more(self) -> bool:
        if len(self._text) > _LONGEST:
            raise MlapatchError(
                Exit.USAGE,
                "the trace is damaged: an event does not end",
                where=f"{self._where}, byte {self._offset:,}",
                found=f"{len(self._text):,} bytes without its closing brace, after {self.events:,} events",
                next="copy the file again, or profile again with fewer steps: mlapatch profile",
            )
        block = next(self._blocks, b"")
        self._text += block
        return bool(block)

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._offset += count

    def _opening(self) -> bytes:
        while not self._text.lstrip(b"\xef\xbb\xbf \t\r\n"):
            if not self._more():
                raise self._not_a_trace("JSON", "an empty file" if not self._offset else "only white space")
        body = self._text.lstrip(b"\xef\xbb\xbf \t\r\n")
        if body[:1] not in (b"{", b"["):
            raise self._not_a_trace("JSON that starts with { or [", f"{body[:20]!r}")
        self._drop(len(self._text) - len(body) + 1)
        return body[:1]

    def _not_a_trace(self, expected: str, found: str = "") -> MlapatchError:
        return MlapatchError(
            Exit.USAGE,
            "this is not a Chrome trace",
            where=self._where,
            expected=expected,
            found=found or f"keys {', '.join(self.meta) or 'none'}",
            next="SGLang writes traces as *.trace.json.gz; see mlapatch profile --help",
        )

    def _object(self) -> Iterator[list[Event]]:
        while True:
            key = self._key()
            if key is None:
                return
            if key == "traceEvents" and self._text[:1] == b"[" and not self._found:
                self._drop(1)
                self._found = True
                yield from self._array()
                if not self.complete:
                    return
                self.complete = False
            elif not self._value(key):
                return

    def _key(self) -> str | None:
        """The next key, with the text moved to its value; None where the object or the file ends."""
        while (match := _KEY.match(self._text)) is None:
            rest = self._text.lstrip(b" \t\r\n,")
            if rest[:1] == b"}":
                self.complete = True
                return None
            if rest and rest[:1] != b'"':
                raise self._not_a_trace("a key in double quotes", f"{rest[:20]!r}")
            if not self._more():
                return None
        self._drop(match.end())
        try:
            return str(orjson.loads(match.group(1)))
        except orjson.JSONDecodeError as error:
            raise self._not_a_trace("a key that is JSON", f"{match.group(1)[:20]!r}: {error}") from None

    def _value(self, key: str) -> bool:
        """Pass over one value, keeping it if it is small; False where the file ends inside it."""
        cut, kept, whole = _Cut(), b"", True
        while (found := cut.advance(self._text)) is None:
            if len(kept) + cut.at > _KEPT:
                whole = False
            kept = kept + self._text[: cut.at] if whole else b""
            self._drop(cut.at)
            cut.at = 0
            if not self._more():
                return False
        kept += self._text[: found[0]]
        self._drop(found[0])
        if whole:
            try:
                self.meta[key] = orjson.loads(kept)
            except orjson.JSONDecodeError:
                self.notes.append(f"the value of {key} is not valid JSON and was left out")
        return True

    def _array(self) -> Iterator[list[Event]]:
        """Batches of the array that the text is in; sets `complete` at its closing bracket."""
        want = _BATCH
        while True:
            ended = False
            while len(self._text) < want and not ended:
                ended = not self._more()
            batch = None if ended else self._guessed()
            if batch is None:
                batch = self._scanned(ended)
            if batch:
                self.events += len(batch)
                yield batch
                want = _BATCH
            elif not self.complete and not ended:
                want = len(self._text) + _BATCH
            if self.complete or ended:
                return

    def _guessed(self) -> list[Event] | None:
        start = _SPACE.match(self._text).end()  # type: ignore[union-attr]  # matches nothing at least
        end = len(self._text)
        for _ in range(3):
            end = self._text.rfind(b"}", start, end)
            while end > start and _GUESS.match(self._text, end) is None:
                end = self._text.rfind(b"}", start, end)
            if end <= start:
                return None
            try:
                batch = orjson.loads(b"[" + self._text[start : end + 1] + b"]")
            except orjson.JSONDecodeError:
                continue
            self._drop(end + 1)
            return [event for event in batch if type(event) is dict]
        return None

    def _scanned(self, ended: bool) -> list[Event]:
        """The exact way: cut the buffered text at each element, up to the closing bracket if it is there."""
        cut, first, elements = _Cut(), 0, list[bytes]()
        while (found := cut.advance(self._text)) is not None:
            position, char = found
            elements.append(self._text[first:position])
            first = position + 1
            if char == b"]":
                self.complete = True
                break
        if ended and not self.complete:
            last = self._text[first:].strip()  # whole, or cut off by the end of the file
            with contextlib.suppress(orjson.JSONDecodeError):
                orjson.loads(last)
                elements.append(last)
        self._drop(first)
        batch: list[Event] = []
        for element in elements:
            text = element.strip()
            if text:
                event = self._lenient(text)
                if type(event) is dict:
                    batch.append(event)
        return batch

    def _lenient(self, text: bytes) -> object:
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass
        try:  # NaN, control characters or a cut UTF-8 name: Kineto has written all three
            return json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            self.skipped += 1
            if self.skipped > 1000 and self.skipped > self.events:
                raise MlapatchError(
                    Exit.USAGE,
                    "the trace is damaged: most of its events are not valid JSON",
                    where=self._where,
                    found=f"{self.skipped:,} unreadable, {self.events:,} readable",
                    next="copy the file again, or profile again: mlapatch profile",
                ) from None
            return None
