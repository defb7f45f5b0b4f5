"""The report: self-contained, escaped, and looked at in a real browser where there is one."""

from __future__ import annotations

import functools
import html.parser
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.report import pick, report
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import charts
from mlapatch.measure.kernels import CAST, IDLE
from mlapatch.measure.runs import Store
from tests.measure.sample_runs import fill

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    fill(folder / "db", folder)
    (folder / "out").mkdir()
    report(output=folder / "out" / "report.html", db=folder / "db")
    return folder / "out" / "report.html"


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens nothing."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_is_one_well_formed_page_that_fetches_nothing(page: Path) -> None:
    text = page.read_text()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.links == ["data:,"]
    assert "<script" not in text
    assert not re.search(r"url\(|@import|https?://(?!127\.0\.0\.1)", text)


def test_it_says_what_was_measured(page: Path) -> None:
    text = page.read_text()
    for wanted in ("70.50 → 5.24 ms", "13.5 x less", "KV-pool cast", "TPOT by prompt length", "65,536", "active-cast"):
        assert wanted in text
    assert "Throughput by concurrency" in text
    assert "&lt;b&gt;not markup&lt;/b&gt; &amp; co" in text
    assert "should not be compared" not in text


def test_another_pool_is_a_warning_at_the_top(tmp_path: Path) -> None:
    fill(tmp_path / "db", tmp_path, pool=131_072, layers=4)
    report(runs=["1", "2"], output=tmp_path / "a.html", db=tmp_path / "db")
    assert "should not be compared: pool_tokens 495552 against 131072" in (tmp_path / "a.html").read_text()


def test_a_label_brings_all_its_kinds(tmp_path: Path) -> None:
    fill(tmp_path / "db", tmp_path, layers=4)
    data = report(runs=["stock", "patched"], output=tmp_path / "a.html", db=tmp_path / "db").data
    assert data["runs"] == [1, 3, 2, 4]
    text = (tmp_path / "a.html").read_text()
    assert "Where a decode step goes" in text
    assert "TPOT by prompt length" in text


def test_one_run_alone_is_a_page_too(tmp_path: Path) -> None:
    fill(tmp_path / "db", tmp_path, layers=4)
    for run in ("1", "4"):
        report(runs=[run], output=tmp_path / "a.html", db=tmp_path / "db")
        assert "<h2>Set-up</h2>" in (tmp_path / "a.html").read_text()


def test_without_runs_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError, match="no run to report on"):
        report(output=tmp_path / "a.html", db=tmp_path / "db")


def test_runs_of_other_kinds_are_no_page_and_are_named(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        for label in ("before", "after"):
            store.finish(store.start("verify", {}, label), {})
        store.start("bench", {}, "half")
    with pytest.raises(MlapatchError, match="no run to report on") as caught:
        report(output=tmp_path / "a.html", db=tmp_path / "db")
    found = "none of these is one: bench 3 (half) (running), verify 2 (after) (done), verify 1 (before) (done)"
    assert caught.value.found == found
    with pytest.raises(MlapatchError, match="no run to report on") as caught:
        report(runs=["after"], output=tmp_path / "a.html", db=tmp_path / "db")
    assert caught.value.found == "none of these is one: verify 2 (after) (done)"


def test_a_folder_that_does_not_exist_is_refused_and_not_made(tmp_path: Path) -> None:
    fill(tmp_path / "db", tmp_path, layers=4)
    with pytest.raises(MlapatchError, match="no such folder; no new report is there") as caught:
        report(output=tmp_path / "nope" / "a.html", db=tmp_path / "db")
    assert (caught.value.exit, caught.value.where) == (Exit.ENVIRONMENT, str(tmp_path / "nope"))
    assert not (tmp_path / "nope").exists()


def test_the_newest_of_each_label_is_picked(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        for kind, label in (("bench", "a"), ("bench", "b"), ("bench", "a"), ("bench", ""), ("launch", "x")):
            store.finish(store.start(kind, {}, label), {})
        store.start("bench", {}, "unfinished")
        assert [run.id for run in pick(store.all())] == [2, 3]


def test_small_parts_become_one_and_colours_differ() -> None:
    parts = [(f"part {n}", 10.0 / n) for n in range(1, 20)]
    bars = charts.gathered([charts.Bar("a", 100.0, [(CAST, 50.0), *parts, (IDLE, 5.0)])])
    assert sum(ms for _, ms in bars[0].parts) == pytest.approx(55.0 + sum(ms for _, ms in parts))
    palette = charts.colours(bars)
    shown = [palette[name] for name, _ in bars[0].parts]
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize("highest", [0.02, 0.7, 1, 5.3, 9.99, 10, 73.8, 100, 1538, 99_999])
def test_ticks_are_few_and_reach_the_top(highest: float) -> None:
    ticks = charts._ticks(highest)
    assert ticks[-1] >= highest
    assert 2 <= len(ticks) <= 8


class _Handler(SimpleHTTPRequestHandler):
    seen: list[str]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Serve, and note what was asked for."""
        self.seen.append(self.path)
        super().do_GET()


@pytest.fixture
def site(page: Path) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    handler: Any = functools.partial(type("Handler", (_Handler,), {"seen": seen}), directory=str(page.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()
    thread.join()


FRAME = """<!doctype html><link rel="icon" href="data:,"><body><iframe src="report.html" width="{width}" height="900">
</iframe><script>
document.querySelector("iframe").onload = (event) => {{
  const page = event.target.contentDocument;
  const shown = [...page.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
  document.body.dataset.result = [page.documentElement.scrollWidth, shown.length,
    shown[0].getAttribute("class"), page.querySelectorAll("h2").length].join(" ");
}};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on PATH")
@pytest.mark.parametrize(("width", "drawing"), [(375, "narrow"), (1280, "wide")])
def test_in_a_browser_it_fits_is_quiet_and_asks_for_nothing(
    width: int, drawing: str, page: Path, site: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, seen = site
    (page.parent / "frame.html").write_text(FRAME.format(width=width))
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--no-first-run", "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}",
        "--enable-logging=stderr",
        "--window-size=1400,1000", "--virtual-time-budget=5000", "--dump-dom", f"{url}/frame.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = re.search(r'data-result="(\d+) (\d+) (\w+) (\d+)"', done.stdout)
    assert result is not None, done.stdout[-2000:]
    scroll, drawings, kind, headings = result.groups()
    assert int(scroll) <= width
    assert (int(drawings), kind) == (2, drawing)
    assert int(headings) >= 6
    assert "CONSOLE" not in done.stderr
    assert sorted(set(seen)) == ["/frame.html", "/report.html"]
