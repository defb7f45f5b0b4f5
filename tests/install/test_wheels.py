"""The wheel store: real wheels of the index, small wheels made here, and everything that can go wrong between."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.version import Version

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install import index as index_module
from mlapatch.install.wheels import WheelStore, read_wheel, unpack_wheel
from tests.conftest import TreeFactory
from tests.corpus import BACKEND, CONTENTS, RELEASES, Corpus
from tests.install.local_index import LocalIndex, find_uv, make_wheel

OTHER = "sglang/srt/model_executor/model_runner.py"
NOISE = random.Random(7).randbytes(3_000_000)  # noqa: S311


@pytest.fixture
def local(local_index: LocalIndex) -> LocalIndex:
    """pip configured, as a user would, for an index of three releases; one of them only as a platform wheel."""
    folder = local_index.folder
    make_wheel(folder, "1.0", {BACKEND: b"one\n", OTHER: b"runner\n", "sglang/noise.bin": NOISE})
    make_wheel(folder, "1.1", {BACKEND: b"two\n", OTHER: b"runner\n"}, tags="cp312-cp312-manylinux_2_34_x86_64")
    make_wheel(folder, "1.2rc1", {BACKEND: b"three\n"})
    return local_index


@pytest.fixture
def store(tmp_path: Path) -> WheelStore:
    return WheelStore(tmp_path / "cache")


def test_the_corpus_is_real(corpus: Corpus, install_tree: TreeFactory) -> None:
    for version in RELEASES:
        release = corpus.release(version)
        assert hashlib.sha256(corpus.text(version)).hexdigest() == release.record[BACKEND]
        tree = install_tree(version)
        assert (tree / BACKEND).read_bytes() == corpus.text(version)
        assert (tree / f"sglang-{version}.dist-info" / "RECORD").is_file()
        assert any("flashinfer_python" in line for line in release.requires)


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content["sha256"][:12])
def test_every_release_has_the_content_that_the_table_says(corpus: Corpus, content: dict[str, object]) -> None:
    releases = content["releases"]
    assert isinstance(releases, list)
    for release in releases:
        text = corpus.text(release)
        assert hashlib.sha256(text).hexdigest() == content["sha256"], release
        assert len(text.splitlines()) == content["lines"], release


def test_reads_only_what_was_asked_and_remembers_it(store: WheelStore, local: LocalIndex) -> None:
    first = store.files("1.0", [BACKEND, "sglang/not-there.py"])
    assert first.files[BACKEND] == b"one\n"
    assert "sglang/not-there.py" not in first.files
    assert first.requires == ["torch==2.9.1"]
    assert first.record["sglang/noise.bin"] == hashlib.sha256(NOISE).hexdigest()
    assert first.wheel_sha256 == hashlib.sha256((local.folder / first.wheel).read_bytes()).hexdigest()
    again = WheelStore(store.root).files(Version("1.0"), [BACKEND, "sglang/not-there.py", "sglang/nor-this.py"])
    assert again == first
    assert local.served == [first.wheel]
    assert not any((store.root / "tmp").iterdir())


def test_a_platform_wheel_is_read_on_any_host(store: WheelStore, local: LocalIndex) -> None:
    assert store.files("1.1", [BACKEND]).files[BACKEND] == b"two\n"


def test_bytes_that_another_release_brought_are_not_fetched_again(store: WheelStore, local: LocalIndex) -> None:
    store.files("1.0", [OTHER])
    store.files("1.1", [BACKEND])
    assert store.files("1.1", [BACKEND, OTHER]).files[OTHER] == b"runner\n"
    assert len(local.served) == 2


def test_lists_the_index(store: WheelStore, local: LocalIndex) -> None:
    assert store.releases() == [Version("1.0"), Version("1.1")]
    assert store.releases(pre=True)[-1] == Version("1.2rc1")


def test_a_second_run_works_offline(store: WheelStore, local: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = store.files("1.0", [BACKEND])
    versions = store.releases(pre=True)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert store.files("1.0", [BACKEND]) == fetched
    stale = store.listing(max_age=0)
    assert stale.offline
    assert stale.versions == versions
    with pytest.raises(MlapatchError, match="cannot be reached") as raised:
        store.files("1.1", [BACKEND])
    assert raised.value.exit is Exit.ENVIRONMENT
    with pytest.raises(MlapatchError, match="cannot list the releases"):
        WheelStore(store.root / "empty").releases()


def test_no_such_version_names_the_nearest(store: WheelStore, local: LocalIndex) -> None:
    with pytest.raises(MlapatchError, match=r"no wheel of sglang 1\.0\.post3") as raised:
        store.files("1.0.post3", [BACKEND])
    assert "1.0, 1.1" in raised.value.found


def test_a_users_constraints_hash_mode_and_quietness_do_not_matter(
    store: WheelStore, local: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("sglang==1.0\n")
    for name, value in (("CONSTRAINT", str(constraints)), ("REQUIRE_HASHES", "1"), ("QUIET", "2"), ("NO_BINARY", "x")):
        monkeypatch.setenv(f"PIP_{name}", value)
    assert store.files("1.1", [BACKEND]).files[BACKEND] == b"two\n"
    assert len(store.releases()) == 2


def test_a_pip_package_in_the_working_folder_is_not_run(
    store: WheelStore, local: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH needs Python 3.11")
    (tmp_path / "pip.py").write_text("raise SystemExit('wrong pip')\n")
    monkeypatch.chdir(tmp_path)
    assert store.files("1.0", [BACKEND]).files[BACKEND] == b"one\n"


def test_a_cut_connection_keeps_nothing_false_and_the_next_run_goes_on(store: WheelStore, local: LocalIndex) -> None:
    store.files("1.1", [BACKEND])
    local.cut = 500_000
    with pytest.raises(MlapatchError) as raised:
        store.files("1.0", [BACKEND])
    assert raised.value.exit is Exit.ENVIRONMENT
    assert not store.has("1.0", [BACKEND])
    assert store.has("1.1", [BACKEND])
    local.cut = None
    assert store.files("1.0", [BACKEND]).files[BACKEND] == b"one\n"


def test_progress_grows_to_the_wheels_size(store: WheelStore, local: LocalIndex) -> None:
    local.delay = 0.01
    seen: list[tuple[str, int, int | None]] = []
    release = store.files("1.0", [BACKEND], progress=lambda *step: seen.append(step))
    size = (local.folder / release.wheel).stat().st_size
    assert seen[-1] == ("sglang 1.0", size, size)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert any(total is not None and abs(total - size) < size / 10 for _, done, total in seen[:-1] if done < size)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_nothing_that_is_taken_for_a_release(
    how: signal.Signals, store: WheelStore, local: LocalIndex
) -> None:
    local.delay = 0.2
    code = (
        "import sys; from pathlib import Path; from mlapatch.install.wheels import WheelStore\n"
        f"WheelStore(Path({str(store.root)!r})).files('1.0', [{BACKEND!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 30
    while not local.served and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, how)
    process.wait(timeout=30)
    assert not list(store.root.glob("releases/*"))
    if how is signal.SIGINT:
        assert not any((store.root / "tmp").iterdir())
    else:
        for left in (store.root / "tmp").iterdir():
            os.utime(left, (1, 1))
    local.delay = 0
    assert store.files("1.0", [BACKEND]).files[BACKEND] == b"one\n"
    assert not any((store.root / "tmp").iterdir())


def test_several_at_once_fetch_once(store: WheelStore, local: LocalIndex) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: WheelStore(store.root).files("1.0", [BACKEND]), range(4)))
    assert all(release == found[0] for release in found)
    assert len(local.served) == 1


@pytest.mark.parametrize("damage", ["flipped", "emptied", "removed", "index emptied"])
def test_a_damaged_cache_is_fetched_again(store: WheelStore, local: LocalIndex, damage: str) -> None:
    store.files("1.0", [BACKEND])
    digest = hashlib.sha256(b"one\n").hexdigest()
    path = store.root / "objects" / digest[:2] / digest
    if damage == "flipped":
        path.write_bytes(b"onE\n")
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "removed":
        path.unlink()
    else:
        (store.root / "releases" / "1.0.json").write_bytes(b"")
    assert store.files("1.0", [BACKEND]).files[BACKEND] == b"one\n"
    assert path.read_bytes() == b"one\n"
    assert len(local.served) == 2


def test_what_record_does_not_prove_is_refused(store: WheelStore, local: LocalIndex) -> None:
    make_wheel(local.folder, "1.3", {BACKEND: b"forged\n"}, wrong=(BACKEND,))
    with pytest.raises(MlapatchError, match="damaged") as raised:
        store.files("1.3", [BACKEND])
    assert BACKEND in raised.value.found
    assert not store.has("1.3", [BACKEND])


def test_unpacks_a_release_as_an_install_would(store: WheelStore, local: LocalIndex, tmp_path: Path) -> None:
    files = {
        "sglang/__init__.py": b"",
        "sglang-1.4.data/purelib/sglang/extra.py": b"extra = 1\n",
        "sglang-1.4.data/scripts/sglang": b"#!python\n",
    }
    make_wheel(local.folder, "1.4", files)
    dest = store.unpack("1.4", tmp_path / "sp")
    assert sorted(str(p.relative_to(dest)) for p in dest.rglob("*") if p.is_file()) == [
        "sglang-1.4.dist-info/METADATA",
        "sglang-1.4.dist-info/RECORD",
        "sglang-1.4.dist-info/WHEEL",
        "sglang/__init__.py",
        "sglang/extra.py",
    ]
    store.unpack("1.4", tmp_path / "second")
    assert len(local.served) == 1, "the wheel of an unpacked release is kept"
    with pytest.raises(MlapatchError, match="not empty"):
        store.unpack("1.4", tmp_path / "sp")


def test_unpacking_is_all_or_nothing(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "1.0", {"a.py": b"a", "sglang/b.py": b"b"}, wrong=("sglang/b.py",))
    with pytest.raises(MlapatchError, match="damaged"):
        unpack_wheel(wheel, tmp_path / "dest")
    assert [p.name for p in tmp_path.iterdir()] == [wheel.name]


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "a/../../evil.py", "C:/evil.py", "a\\..\\evil.py"])
def test_a_member_outside_the_wheel_is_refused(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / "w", "1.0", {BACKEND: b"x\n"})
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, b"evil")
    for attempt in (lambda: read_wheel(wheel, [BACKEND]), lambda: unpack_wheel(wheel, tmp_path / "dest")):
        with pytest.raises(MlapatchError, match="outside"):
            attempt()
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize(("name", "data"), [("sglang-1.0-py3-none-any.whl", b"PK no"), ("notes.whl", b"")])
def test_what_is_no_wheel_says_so(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MlapatchError, match="damaged"):
        read_wheel(tmp_path / name, [BACKEND])
    with pytest.raises(MlapatchError, match="no such wheel"):
        read_wheel(tmp_path / "sglang-9.9-py3-none-any.whl", [BACKEND])


def test_a_full_disk_is_named(store: WheelStore, local: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlapatch.install.wheels.tempfile.mkstemp", full)
    with pytest.raises(MlapatchError, match="no space left") as raised:
        store.files("1.0", [BACKEND])
    assert "MLAPATCH_CACHE" in raised.value.next


def test_without_pip_another_is_found_or_the_next_step_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"uv": "/bin/uv"}
    monkeypatch.setattr("mlapatch.install.index.importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("mlapatch.install.index.shutil.which", found.get)
    assert index_module.pip_command() == ["/bin/uv", "tool", "run", "--quiet", "pip"]
    found["pip3"] = "/usr/bin/pip3"
    assert index_module.pip_command() == ["/usr/bin/pip3"]
    found.clear()
    with pytest.raises(MlapatchError) as raised:
        index_module.pip_command()
    assert "ensurepip" in raised.value.next


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("sglang (0.5.9)\nAvailable versions: 0.5.9, 0.5.8.post1\n  INSTALLED: 0.5.9\n", ["0.5.9", "0.5.8.post1"]),
        ('{"name": "sglang", "versions": ["0.5.9", "0.5.8"], "latest": "0.5.9"}', ["0.5.9", "0.5.8"]),
        ("", []),
        ("{broken", []),
    ],
)
def test_pips_listing_is_read_in_both_forms(output: str, expected: list[str]) -> None:
    assert index_module._versions_in(output) == expected


def test_an_old_pip_without_index_still_lists(
    store: WheelStore, local: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = index_module.pip_command()
    old = tmp_path / "old-pip"
    old.write_text(f'#!/bin/sh\n[ "$1" = index ] && exit 2\nexec {" ".join(real)} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setattr(index_module, "pip_command", lambda: [str(old)])
    assert store.releases() == [Version("1.0"), Version("1.1")]


def test_uv_finds_pip_for_a_venv_that_has_none(
    store: WheelStore, local: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = find_uv()
    if uv is None:
        pytest.skip("uv is not installed")
    if subprocess.run([uv, "tool", "run", "--quiet", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("uv cannot fetch pip here")
    monkeypatch.setattr(index_module, "pip_command", lambda: [uv, "tool", "run", "--quiet", "pip"])
    assert store.files("1.0", [BACKEND]).files[BACKEND] == b"one\n"
