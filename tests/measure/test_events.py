"""The event splitter: any layout, any key order, and files that end early or are damaged."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlapatch.errors import MlapatchError
from mlapatch.measure import events as splitter
from mlapatch.measure.bytesource import ByteSource
from mlapatch.measure.events import EventReader
from mlapatch.measure.spool import Spool


def split(text: bytes, block: int) -> tuple[list[dict[str, Any]], EventReader]:
    reader = EventReader((text[i : i + block] for i in range(0, len(text), block)), "t.json")
    return [event for batch in reader for event in batch], reader


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitter, "_BATCH", 200)


EVENTS = [
    {"ph": "X", "name": 'quote " and } , { brace', "args": {"grid": [1, 2], "list": [{"a": 1}, {"b": {}}]}},
    {"ph": "X", "name": "back\\slash\\", "args": {}},
    {"ph": "i", "name": "umlaut \u00fc ]}", "args": {"x": None}},
] * 40

LAYOUTS = {
    "kineto": json.dumps({"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "x"}, indent=2),
    "one line": json.dumps({"traceEvents": EVENTS, "deviceProperties": [{"id": 0}, {"id": 1}]}, separators=(",", ":")),
    "events last": json.dumps({"deviceProperties": [{"id": 0}, {"id": 1}], "a": "} , {", "traceEvents": EVENTS}),
    "array form": json.dumps(EVENTS),
    "deep": json.dumps({"x": {"traceEvents": [1, {"a": []}]}, "traceEvents": EVENTS, "z": [[[]], "]"]}, indent=1),
    "unicode": json.dumps({"traceEvents": EVENTS}, ensure_ascii=False),
    "white space": "\n \t " + json.dumps({"traceEvents": EVENTS}).replace("}, {", "}\n\t ,\n\n  {"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [1, 7, 64, 1000, 1 << 20])
def test_every_layout_gives_every_event(layout: str, block: int) -> None:
    text = LAYOUTS[layout]
    found, reader = split(text.encode(), block)
    assert found == EVENTS
    assert reader.notes == []
    assert reader.complete


def test_other_keys_are_kept() -> None:
    _, reader = split(LAYOUTS["events last"].encode(), 50)
    assert reader.meta["deviceProperties"] == [{"id": 0}, {"id": 1}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_anywhere_gives_a_prefix_and_a_note(layout: str) -> None:
    text = LAYOUTS[layout].encode()
    rng = random.Random(1)  # noqa: S311
    refused: list[bytes] = []
    for cut in sorted(rng.sample(range(20, len(text) - 1), 60)):
        try:
            found, reader = split(text[:cut], 333)
        except MlapatchError:
            refused.append(text[:cut])
            continue
        assert found == EVENTS[: len(found)]
        assert any("partial" in note for note in reader.notes)
    assert all(not begun.startswith(b"[") and b'"traceEvents": [{' not in begun for begun in refused)


@pytest.mark.parametrize("text", ["", "  \n", "hello", '{"a": 1}', '"traceEvents"', '{"traceEvents": 3}', "<html>"])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(MlapatchError, match="not a Chrome trace"):
        split(text.encode(), 100)


def test_an_unreadable_event_is_left_out_and_counted() -> None:
    text = json.dumps({"traceEvents": EVENTS}).replace('"ph": "i"', '"ph": oops', 1)
    found, reader = split(text.encode(), 100)
    assert len(found) == len(EVENTS) - 1
    assert any("1 events are not valid JSON" in note for note in reader.notes)


def test_what_kineto_writes_wrongly_is_read() -> None:
    text = b'{"traceEvents": [{"name": "tab\tin", "dur": NaN}, {"name": "cut \xc3", "dur": 1}, {"n": -Infinity}]}'
    found, reader = split(text, 10)
    assert len(found) == 3
    assert reader.skipped == 0


def test_a_damaged_file_ends_with_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitter, "_LONGEST", 5000)
    with pytest.raises(MlapatchError, match="an event does not end"):
        split(b'{"traceEvents": [{"name": "' + b"x" * 50_000, 1000)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), max_size=12),
    st.integers(1, 60),
    st.sampled_from([None, 0, 1, 3]),
    st.booleans(),
)
def test_any_json_is_split_as_json_reads_it(
    written: list[dict[str, Any]], block: int, indent: int | None, ascii_only: bool
) -> None:
    document = {"before": written, "traceEvents": written, "after": written}
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    found, _ = split(text, block)
    assert found == written


def test_gzip_members_truncation_and_damage(tmp_path: Path) -> None:
    body = LAYOUTS["kineto"].encode()
    half = len(body) // 2
    file = tmp_path / "a.gz"
    file.write_bytes(gzip.compress(body[:half]) + gzip.compress(body[half:]) + b"\0" * 10)
    source = ByteSource(file)
    assert b"".join(source) == body
    assert source.damage == ""
    packed = gzip.compress(random.Random(0).randbytes(50_000))  # noqa: S311
    file.write_bytes(packed[:-20_000])
    source = ByteSource(file)
    assert b"".join(source)
    assert "ends early" in source.damage
    file.write_bytes(packed[:20_000] + bytes(5000) + packed[25_000:])
    source = ByteSource(file)
    b"".join(source)
    assert "damaged" in source.damage


def test_the_spool_sorts_with_and_without_a_file() -> None:
    rng = random.Random(3)  # noqa: S311
    records = [(rng.uniform(0, 1e6), rng.uniform(1, 9), i % 7, i) for i in range(5000)]
    for run in (100_000, 700):
        spool = Spool(run)
        for begin in range(0, 5000, 250):
            spool.extend(records[begin : begin + 250])
        for _ in range(2):
            assert list(spool) == sorted(records)
        spool.close()


def test_runs_that_follow_each_other_are_not_merged() -> None:
    spool = Spool(100)
    for i in range(1000):
        spool.extend([(float(i), 1.0, 0, i)])
    assert [record[3] for record in spool] == list(range(1000))
