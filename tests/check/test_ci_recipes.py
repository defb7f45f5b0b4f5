"""Every recipe of docs/ci.md is run as it stands there, on an index where it passes and on one where it must fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlapatch
from mlapatch.exits import Exit
from tests.conftest import TreeFactory
from tests.corpus import BACKEND, RUNNER, Corpus
from tests.install.local_index import LocalIndex, make_wheel

DOC = (Path(__file__).parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")


def block(heading: str, language: str) -> str:
    section = DOC.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert found, f"no {language} block under {heading}"
    return found[1]


def steps(workflow: str) -> dict[str, str]:
    """`run` of each named step of a workflow."""
    found = re.findall(r"^( +)- name: (.+?)\n +run: \|\n((?:\1    .*\n|\n)+)", workflow, re.MULTILINE)
    return {name: re.sub(rf"^{indent}    ", "", text, flags=re.MULTILINE) for indent, name, text in found}


@pytest.fixture
def shell(local_index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `bin` has this mlapatch first on PATH; the working folder for recipes is `work`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    program = tmp_path / "bin" / "mlapatch"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlapatch "$@"\n')
    program.chmod(0o755)
    source = Path(mlapatch.__file__).parents[1]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("MLAPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setattr("mlapatch.install.wheels._LISTING_SECONDS", 0)
    return tmp_path / "work"


def release(index: LocalIndex, corpus: Corpus, version: str, *, fits: bool = True) -> None:
    text = corpus.text("0.5.23")
    files = {
        BACKEND: text if fits else text.replace(b"get_key_buffer", b"get_kv_buffer"),
        RUNNER: corpus.text("0.5.23", RUNNER),
    }
    make_wheel(index.folder, version, files, requires=("flashinfer_python==0.7.2",))


def sh(script: str, work: Path, *, program: str = "bash") -> subprocess.CompletedProcess[str]:
    # GitHub runs steps with `bash -e -o pipefail`.
    flags = ["-e", "-o", "pipefail"] if program == "bash" else []
    return subprocess.run([program, *flags, "-c", script], cwd=work, capture_output=True, text=True, check=False)


def git(*args: str, cwd: Path) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *who, *args], cwd=cwd, check=True, capture_output=True, text=True).stdout


def test_the_workflow(shell: Path, local_index: LocalIndex, corpus: Corpus) -> None:
    release(local_index, corpus, "0.9.0")
    remote = shell.parent / "remote.git"
    git("init", "--bare", str(remote), cwd=shell.parent)
    git("init", cwd=shell)
    git("commit", "--allow-empty", "-m", "start", cwd=shell)
    git("remote", "add", "origin", str(remote), cwd=shell)
    git("push", "-u", "origin", "HEAD", cwd=shell)
    run = steps(block("GitHub Actions", "yaml"))
    assert next(iter(run)) == "Install"
    write, commit, newest = list(run)[1:]

    for name in (write, commit, newest):
        done = sh(run[name], shell)
        assert done.returncode == 0, (name, done.stderr)
    assert "| 0.9.0 |" in git("show", "origin/main:docs/compat.md", cwd=shell)
    summary = Path(os.environ["GITHUB_STEP_SUMMARY"]).read_text()
    assert "| 0.9.0 |" in summary
    assert "active-cast: applicable" in summary
    head = git("rev-parse", "HEAD", cwd=shell)

    table = shell / "docs" / "compat.md"  # the next night: only the date is another
    table.write_text(re.sub("^Written on .*", "Written on 2001-01-01.", table.read_text(), flags=re.MULTILINE))
    assert sh(run[commit], shell).returncode == 0
    assert git("rev-parse", "HEAD", cwd=shell) == head
    git("checkout", "HEAD", "--", "docs", cwd=shell)

    release(local_index, corpus, "0.9.1", fits=False)
    (shell.parent / "cache" / "listing.json").unlink()
    assert sh(run[write], shell).returncode == 0
    assert sh(run[commit], shell).returncode == 0
    assert "| 0.9.1 |" in git("show", "origin/main:docs/compat.md", cwd=shell)
    failed = sh(run[newest], shell)
    assert failed.returncode == Exit.FOUND
    assert "does not fit: active-cast on 0.9.1" in Path(os.environ["GITHUB_STEP_SUMMARY"]).read_text()


def test_the_shell_recipe(
    shell: Path, local_index: LocalIndex, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = block("Any other CI, or cron", "sh")
    release(local_index, corpus, "0.9.0")
    done = sh(script, shell, program="sh")
    assert done.returncode == 0, done.stderr
    assert "an upgrade is safe" in done.stdout
    release(local_index, corpus, "0.9.1", fits=False)
    (shell.parent / "cache" / "listing.json").unlink()
    done = sh(script, shell, program="sh")
    assert done.returncode == Exit.FOUND
    assert "get_kv_buffer" in done.stdout
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("MLAPATCH_CACHE", str(shell.parent / "fresh"))
    done = sh(script, shell, program="sh")
    assert done.returncode == Exit.ENVIRONMENT
    assert "cannot be reached" in done.stdout


@pytest.mark.parametrize("pin", ["sglang=={}", "sglang[srt]=={} ; python_version >= '3.10'  # ours"])
def test_the_one_liner(shell: Path, local_index: LocalIndex, corpus: Corpus, pin: str) -> None:
    script = block("Before a commit that moves the pin", "sh")
    release(local_index, corpus, "0.9.0")
    release(local_index, corpus, "0.9.1", fits=False)
    for version, code in (("0.9.0", Exit.OK), ("0.9.1", Exit.FOUND)):
        (shell / "requirements.txt").write_text(f"torch==2.9.1\n{pin.format(version)}\nother==1\n")
        done = sh(script, shell)
        assert done.returncode == code, done.stderr


def test_the_pre_commit_hook(shell: Path, local_index: LocalIndex, corpus: Corpus) -> None:
    entry = re.search(r"^ +entry: (.+)$", block("Before a commit that moves the pin", "yaml"), re.MULTILINE)
    assert entry
    release(local_index, corpus, "0.9.0")
    release(local_index, corpus, "0.9.1", fits=False)
    for version, code in (("0.9.0", Exit.OK), ("0.9.1", Exit.FOUND)):
        (shell / "requirements.txt").write_text(f"sglang=={version}\n")
        assert sh(entry[1], shell).returncode == code


@pytest.mark.parametrize("fits", [True, False])
def test_the_dockerfile(shell: Path, install_tree: TreeFactory, monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    """Its RUN lines but for the install, one after the other, as a build does: the first that fails ends it."""
    site = install_tree("0.5.9")
    if not fits:
        text = (site / BACKEND).read_text()
        (site / BACKEND).write_text(text.replace("get_key_buffer", "get_kv_buffer"))
    before = (site / BACKEND).read_bytes()
    monkeypatch.setenv("MLAPATCH_SGLANG", str(site))
    lines = [line.removeprefix("RUN ") for line in block("Dockerfile", "dockerfile").splitlines() if line[:4] == "RUN "]
    assert "pip install" in lines[0]
    codes = []
    for line in lines[1:]:
        done = sh(line, shell, program="sh")
        codes.append(done.returncode)
        if done.returncode:
            break
    assert codes == ([0, 0] if fits else [Exit.DOES_NOT_FIT])
    assert ((site / BACKEND).read_bytes() != before) == fits
    if fits:
        return
    assert "get_kv_buffer" in done.stderr, "the log says why"
