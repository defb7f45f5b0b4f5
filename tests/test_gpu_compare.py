"""bench/gpu: the edit that gives a server its weights, the load that is scored, and how outputs are compared."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TreeFactory

GPU = Path(__file__).parents[1] / "bench" / "gpu"
RELEASE = "0.5.15.post1"  # the payload's


def module(name: str) -> Any:
    """One of the modules that run on the GPU machine, which are not in a package."""
    sys.path.insert(0, str(GPU))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(GPU))


def scored(*tokens: tuple[int, float, dict[int, float]]) -> list[list[Any]]:
    return [[value, token, [[v, t] for t, v in best.items()]] for token, value, best in tokens]


def test_the_loader_of_a_real_release_calls_the_shipped_weights(wheel_dir: TreeFactory, tmp_path: Path) -> None:
    copies = module("copies")
    site = wheel_dir(RELEASE)
    (tmp_path / copies.FOLDER).mkdir(parents=True)
    copies.give_weights(site, tmp_path)
    text = (tmp_path / copies.FOLDER / "loader.py").read_text()
    assert "initialize_dummy_weights(model)" not in text
    compile(text, "loader.py", "exec")
    assert "import initialize\n\n            initialize(model)\n\n            _post_load_weights(model)\n" in text
    assert (tmp_path / copies.FOLDER / f"{copies.MODULE}.py").read_bytes() == (GPU / "dummy_weights.py").read_bytes()
    assert copies.SAID in (GPU / "dummy_weights.py").read_text()


def test_a_loader_without_the_call_is_refused(tmp_path: Path) -> None:
    copies = module("copies")
    (tmp_path / copies.FOLDER).mkdir(parents=True)
    (tmp_path / copies.FOLDER / "loader.py").write_text("            initialize_dummy_weights(model, seed)\n")
    with pytest.raises(SystemExit, match="0 lines"):
        copies.give_weights(tmp_path, tmp_path)


def test_equal_tokens_are_compared_until_one_differs() -> None:
    differences = module("differences")
    reference = {"a": scored((1, -1.0, {}), (2, -2.0, {3: -2.125}), (4, -1.0, {})), "b": scored((5, -1.0, {}))}
    found = {"a": scored((1, -1.5, {}), (3, -2.0, {2: -2.25}), (9, -7.0, {})), "b": scored((5, -1.0, {}))}
    apart = differences.apart(found, reference)
    assert apart["prefill_tokens"] == 2
    assert apart["prefill_largest"] == 0.5
    assert (apart["tokens"], apart["largest"], apart["not_among_the_best"]) == (1, 0.25, 0)
    (row,) = differences.explained(found, reference)
    assert (row["prompt"], row["step"], row["ids"]) == ("a", 1, [2, 3])
    assert (row["margin"], row["moved"]) == (0.125, 0.375)
    assert differences.margins([row]) == {"outputs": 1, "unknown": 0, "margin": [0.125, 0.125], "moved": [0.375, 0.375]}
    assert differences.in_words(row) == (
        "a, token 1: 2 (-2.000; here -2.250), here 3 (-2.125; here -2.000); margin 0.125, moved 0.375"
    )
    assert differences.agreement(differences.ids(found), differences.ids(reference))["first_difference"] == {"a": 1}


def test_a_token_that_the_other_did_not_rank_is_said_to_be_further_down() -> None:
    differences = module("differences")
    reference, found = {"a": scored((2, -2.0, {2: -2.0}))}, {"a": scored((3, -1.0, {3: -1.0}))}
    assert differences.apart(found, reference)["not_among_the_best"] == 1
    (row,) = differences.explained(found, reference)
    assert row["margin"] is None
    assert differences.margins([row]) == {"outputs": 1, "unknown": 1, "margin": None, "moved": None}
    assert "margin further down" in differences.in_words(row)
    with pytest.raises(LookupError):
        differences.by_load({}, reference)


class Server(BaseHTTPRequestHandler):
    """/generate as SGLang answers it, by position only."""

    def do_POST(self) -> None:
        """One answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        new = body["sampling_params"]["max_new_tokens"]
        assert body["return_logprob"] is True
        tokens = [[-0.5, len(body["input_ids"]) + i, None] for i in range(new)]
        best = [[token, *([-1.0 - i, i, None] for i in range(body["top_logprobs_num"] - 1))] for token in tokens]
        text = json.dumps({"meta_info": {"output_token_logprobs": tokens, "output_top_logprobs": best}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_load_scores_each_prompt_and_its_endings(port: int) -> None:
    greedy, differences = module("greedy"), module("differences")
    load = (port, greedy.Prompts.seeded(), (512, 8192))
    found = greedy.scores(*load, 2) | greedy.ending_scores(*load)
    assert set(found) == {"512", "8192", "stream-0", "stream-1", *(f"{n}/{i}" for n in (512, 8192) for i in range(4))}
    assert found["512"][0] == [-0.5, 512, [[-0.5, 512], *([-1.0 - i, i] for i in range(4))]]
    assert {len(tokens) for name, tokens in found.items() if "/" in name} == {greedy.ENDING_TOKENS}
    loads = differences.by_load(found, found)
    assert {load: fact["tokens"] for load, fact in loads.items()} == {"512": 59, "8192": 59, "streams": 62}
    assert differences.summary(loads).startswith("512: 0.0000 / 0.0000 / 0.0000 of 59, prefill 0.0000; ")
    assert differences.explained(found, found) == []


def test_the_variants_name_what_they_are_compared_with() -> None:
    variants = module("variants").VARIANTS
    assert {variant.compare_with for variant in variants.values()} <= variants.keys()
    assert variants["stock-eager"].lengths == variants["gather-cast-eager"].lengths
    assert variants["dsa-active-cast"].model == variants["dsa-stock"].model
