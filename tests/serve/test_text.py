"""Secrets, the log pump, and what counts as an answer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mlapatch.cli.serving import split_words
from mlapatch.serve import redact
from mlapatch.serve.health import judge_ids, judge_text
from mlapatch.serve.log_pump import Filter, pump


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("--api-key", True),
        ("--admin-api-key", True),
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("MY_PASSWORD", True),
        ("--ssl-keyfile", False),
        ("--tokenizer-path", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("--max-total-tokens", False),
        ("PATH", False),
    ],
)
def test_what_is_a_secret(name: str, secret: bool) -> None:
    assert redact.is_secret_name(name) is secret


def test_arguments() -> None:
    words = ["env", "HF_TOKEN=abcdef", "python", "--api-key", "k1", "--port", "8", "--admin-api-key=k2", "x=1"]
    shown = ["env", "HF_TOKEN=***", "python", "--api-key", "***", "--port", "8", "--admin-api-key=***", "x=1"]
    assert redact.arguments(words) == shown
    assert redact.secrets(["--api-key", "long-enough"], {"A_TOKEN": "abcdefg", "B_TOKEN": "x"}) == (
        "long-enough",
        "abcdefg",
    )


def test_text() -> None:
    line = "ServerArgs(api_key='k1', admin_api_key='k2', tokenizer_path='/m', port=8) abcdefg"
    shown = "ServerArgs(api_key='***', admin_api_key='***', tokenizer_path='/m', port=8) ***"
    assert redact.text(line, ["abcdefg"]) == shown
    assert redact.text("api_key=None", []) == "api_key=None"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_secret_cut_by_a_read_or_a_flush_is_found(size: int) -> None:
    data = b"progress 10%\rprogress se" + b"cret-value 20%\nlast secret-value"
    stream, out = Filter(["secret-value"]), b""
    for start in range(0, len(data), size):
        out += stream.feed(data[start : start + size])
        out += stream.flush()
    out += stream.close()
    assert out == data.replace(b"secret-value", b"***")


def test_bytes_that_are_no_text_pass_through() -> None:
    data = bytes(range(256)) * 3
    stream = Filter(["secret-value"])
    assert stream.feed(data) + stream.close() == data


def test_pump_ends_with_the_last_writer(tmp_path: Path) -> None:
    source, sink = os.pipe()
    log = tmp_path / "log"
    thread = threading.Thread(target=pump, args=(source, log, ["secret-value"]))
    thread.start()
    os.write(sink, b"a secret-value\nunfinished")
    os.close(sink)
    thread.join(10)
    os.close(source)
    assert log.read_bytes() == b"a ***\nunfinished"


@pytest.mark.parametrize(
    ("text", "tokens", "sane"),
    [
        (" Paris. The capital of Germany is Berlin.", 10, True),
        (" Paris", 2, True),
        ("巴黎是法国的首都", 6, True),
        (" a a b c", 4, True),
        ("", 0, False),
        (" Paris", 1, False),
        ("!!!!!!!!!!!!!!!!", 16, False),
        ("the the the the the the the", 8, False),
        ("\ufffd\ufffd\ufffda\ufffd\ufffd", 6, False),
        ("\x00\x01\x02\x03abc", 6, False),
    ],
)
def test_judge_text(text: str, tokens: int, sane: bool) -> None:
    assert (judge_text(text, tokens) == "") is sane


@pytest.mark.parametrize(
    ("ids", "sane"), [([1, 2, 3], True), ([5, 5, 5, 6], True), ([], False), ([7], False), ([0] * 8, False)]
)
def test_judge_ids(ids: list[int], sane: bool) -> None:
    assert (judge_ids(ids) == "") is sane


@pytest.mark.parametrize(
    ("argv", "words", "command", "expected"),
    [
        ("launch", [], False, (None, [])),
        ("launch s.sh", ["s.sh"], False, (Path("s.sh"), [])),
        ("launch -- --port 9", ["--port", "9"], False, (None, ["--port", "9"])),
        ("launch s.sh -- a", ["s.sh", "a"], False, (Path("s.sh"), ["a"])),
        ("launch --command -- python -- x", ["python", "--", "x"], True, (None, ["python", "--", "x"])),
    ],
)
def test_words(argv: str, words: list[str], command: bool, expected: tuple[Path | None, list[str]]) -> None:
    assert split_words(words, ["mlapatch", *argv.split()], command) == expected
