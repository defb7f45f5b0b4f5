"""What others measured or configured, as mlapatch reads it: server logs, Chrome traces, config.json."""

from __future__ import annotations

import gzip
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from mlapatch.commands.diagnose import read
from tests.measure.synthetic import Scene
from tests.reliability._attempts import Oracle, Tally, run
from tests.reliability._mutate import HOSTILE, misshapen, mutated
from tests.reliability._place import Place

SERVE = Path(__file__).parents[1] / "serve"


def _logs() -> list[bytes]:
    return [path.read_bytes() for folder in ("data", "cases") for path in sorted((SERVE / folder).glob("*.log"))]


_TIME = b"[2026-11-29 16:00:00"


def _odd_logs() -> dict[str, bytes]:
    """Logs that no server writes."""
    rng = random.Random(7)  # noqa: S311
    return {
        "nothing": b"",
        "binary": bytes(rng.randrange(256) for _ in range(300_000)),
        "a line of 50 MB": b"x" * (50 << 20),
        "50 MB of escapes": b"\x1b[" * (25 << 20),
        "50 MB of carriage returns": b"\r" * (50 << 20),
        "a line of 50 MB that says error": b"error traceback (most recent call last) " * ((50 << 20) // 40),
        "records glued on one line": (_TIME + b" TP0] error ") * 4000,
        "100,000 ranks": b"".join(_TIME + b" TP%d] exception error %d\n" % (i, i) for i in range(100_000)),
        "a rank of 60,000 digits": _TIME + b" TP" + b"9" * 60_000 + b"] error\n",
        "ranks of many names": b"".join(_TIME + b" A%d B%d TP1] killed\n" % (i, i) for i in range(20_000)),
        "brackets": b"[" * 60_000 + b"\n" + b"(" * 60_000 + b"\n" + b"server_args=ServerArgs(" + b"(" * 60_000,
        "50,000 tracebacks": b"Traceback (most recent call last):\n  File x\nValueError: y\n" * 50_000,
        "a traceback without an end": b"Traceback (most recent call last):\n" + b'  File "a.py", line 1\n' * 300_000,
        "spaces": (_TIME + b" TP0] error" + b" " * 60_000 + b"x\n") * 40,
        "commas": (_TIME + b" TP0] error: CUDA out of memory. Tried to allocate " + b"1," * 30_000 + b"\n") * 20,
        "dots": (b"ImportError: " + b"a." * 30_000 + b"\n") * 20,
        "digits": (_TIME + b" TP0] Load weight end. elapsed=" + b"9" * 60_000 + b" error s\n") * 20,
        "nested quotes": (b"RuntimeError: " + b"'\"" * 30_000 + b"\n") * 20,
        "surrogates": b"\xed\xa0\x80" * 20_000 + b" error\n",
        "every control character": bytes(range(32)) * 1000 + b"error\n" + bytes(range(128, 256)) * 100,
        "UTF-16": ("Traceback (most recent call last):\nValueError: x\n" * 100).encode("utf-16"),
    }


def odd_logs(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Logs that no server writes, as files and as standard input would be read."""
    tally = Tally("inputs", "server logs that no server writes (binary, 50 MB lines, 100,000 ranks): diagnose")
    logs = _odd_logs()
    large = [name for name, data in logs.items() if len(data) > 4 << 20]
    for name, data in logs.items():
        if name in large and not thorough:
            continue
        path = place.work / "odd.log"
        path.write_bytes(data)
        tally.attempt(name, lambda p=path: run("diagnose", p), Oracle((), place.writable))  # type: ignore[misc]
    for name in ("/dev/null", str(place.work), "/nonexistent", "/proc/self/mem"):
        tally.attempt(name, lambda n=name: run("diagnose", n), Oracle((), place.writable))  # type: ignore[misc]
    return tally


def logs(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of real logs, cut anywhere."""
    tally = Tally("inputs", "mutants of real server logs: diagnose")
    real = _logs()
    shorter = [log[-60_000:] for log in real]
    for number in range(180 if thorough else 20):
        data = rng.choice(shorter)
        for _ in range(rng.choice((1, 3, 10))):
            data = mutated(data, rng, tuple(shorter))[: 1 << 20]

        def told(data: bytes = data) -> None:
            found = read(io.BytesIO(data)).as_dict()
            assert found["cause"], "no cause"
            shown = json.dumps(found, ensure_ascii=False)
            assert not any(ord(c) < 32 for c in shown), "control characters in the diagnosis"

        tally.attempt(f"{number}", told)
    return tally


def traces(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of synthetic Kineto traces: bytes, cut gzip streams, and events of any shape."""
    tally = Tally("inputs", "mutants of Chrome traces, plain and gzip: trace")
    folder = place.work / "traces"
    folder.mkdir()
    oracle = Oracle((), (*place.writable, Path(tempfile.gettempdir())))  # long traces are spooled there
    scenes = [
        Scene(layers=4, steps=3, graphs=g, shapes=s, spans=s, prefill=g) for g in (True, False) for s in (True, False)
    ]
    good = []
    for number, scene in enumerate(scenes):
        path = folder / f"good-{number}.trace.json"
        scene.write(path)
        data = path.read_bytes()
        good.append(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    for number in range(80 if thorough else 6):
        data = rng.choice(good)
        kind = rng.randrange(6)
        if kind < 3:
            data = _odd_events(data, rng)
        elif kind < 5:
            for _ in range(rng.choice((1, 5, 30))):
                data = mutated(data, rng)[: 8 << 20]
        if rng.random() < 0.4:
            data = gzip.compress(data, 1)
            data = mutated(data, rng) if rng.random() < 0.6 else data
        path = folder / ("bad.trace.json.gz" if data[:2] == b"\x1f\x8b" else "bad.trace.json")
        path.write_bytes(data)
        options = rng.choice(((), ("--json",), ("--steps", "3"), ("--layers", "4"), ("--tokens", "495552")))
        tally.attempt(f"{number}", lambda p=path, o=options: run("trace", p, *o), oracle)  # type: ignore[misc]
    odd = _odd_traces() if thorough else {}
    for name, text in odd.items():
        path = folder / "odd.trace.json"
        path.write_bytes(text)
        tally.attempt(name, lambda p=path: run("trace", p), oracle)  # type: ignore[misc]
    return tally


def _odd_events(data: bytes, rng: random.Random) -> bytes:
    trace = json.loads(data)
    events = trace["traceEvents"]
    for _ in range(rng.choice((1, 10, 300))):
        at = rng.randrange(len(events))
        events[at] = misshapen(events[at], rng)
    if rng.random() < 0.2:
        meta = {key: value for key, value in trace.items() if key != "traceEvents"}
        trace = {
            **misshapen({**meta, "deviceProperties": [{"id": 0, "name": "x", "computeMajor": 9}]}, rng),
            "traceEvents": events,
        }
    return json.dumps(trace).encode("utf-8", "replace")


def _odd_traces() -> dict[str, bytes]:
    event = (
        '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":2,"args":{"grid":[1,1,1],"correlation":1}}'
    )
    return {
        "nested 100,000 deep": b'{"traceEvents":[' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
        "nested beside": b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b',"traceEvents":[]}',
        "a time of 400 digits": f'{{"traceEvents":[{event.replace(":1,", ":" + "9" * 400 + ",")}]}}'.encode(),
        "a name of 5 MB": f'{{"traceEvents":[{event.replace("k", "<" * (5 << 20))}]}}'.encode(),
        "a name of 2,000 brackets": f'{{"traceEvents":[{event.replace("k", "<" * 2000 + ">" * 2000)}]}}'.encode(),
        "200,000 names": ("[" + ",".join(event.replace('"k"', f'"k{i}"') for i in range(100_000)) + "]").encode(),
        "20,000 devices": (
            "[" + ",".join(event.replace('"pid":0', f'"pid":{i}') for i in range(20_000)) + "]"
        ).encode(),
        "a gzip of 256 MB of spaces": gzip.compress(b" " * (256 << 20), 1),
        "a gzip of many members": gzip.compress(b"") * 100_000,
        "a bad key": b'{"\\x": 1, "traceEvents":[]}',
        "a key that is no UTF-8": b'{"\xff": 1, "traceEvents":[]}',
        "a key of 5 MB": b'{"' + b"a" * (5 << 20) + b'": 1, "traceEvents":[]}',
        "100,000 keys": b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b',"traceEvents":[]}',
        "numbers that are none": f"[{event.replace(':2,', ':NaN,')},{event.replace(':2,', ':Infinity,')}]".encode(),
        "no JSON": b"<html>",
        "nothing": b"",
    }


CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "num_hidden_layers": 78, "num_attention_heads": 64, "index_topk": 2048,
    "index_head_dim": 128,
}  # fmt: skip
MULTIMODAL: dict[str, Any] = {"architectures": ["X"], "text_config": CONFIG}


def configs(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of a model's config.json."""
    tally = Tally("inputs", "mutants of a model's config.json: estimate, backends")
    path = place.work / "config.json"
    data = json.dumps(CONFIG).encode()
    for number in range(200 if thorough else 8):
        variant: Any = dict(CONFIG)
        if number < 2 * len(HOSTILE):
            variant[rng.choice(list(CONFIG))] = HOSTILE[number % len(HOSTILE)]
            text = json.dumps(variant).encode("utf-8", "replace")
        else:
            text = (
                json.dumps(misshapen(rng.choice((CONFIG, MULTIMODAL)), rng)).encode("utf-8", "replace")
                if rng.random() < 0.7
                else mutated(data, rng)
            )
        path.write_bytes(text)
        for verb in (("estimate",), ("backends", "--release", "0.5.9", "--gpu", "h200")):
            options = rng.choice(((), ("--json",), ("--tp", "3")))
            tally.attempt(f"{number}: {text[:80]!r}", lambda v=verb, o=options: run(*v, "--model", path, *o))  # type: ignore[misc]
    return tally
