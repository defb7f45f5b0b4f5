"""The release's own bytes of a file, proven: from HEAD of a checkout, or from the matching wheel by RECORD's sha256."""

from __future__ import annotations

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.target import Target
from mlapatch.install.write import sha256


def original_bytes(target: Target, relative: str) -> bytes:
    """The file as released or committed; MlapatchError (exit 5) where it cannot be had or proven."""
    if target.repository is not None:
        from mlapatch.install.git import head_bytes

        committed = head_bytes(target.repository, target.file(relative))
        if committed is not None:
            return committed
    recorded = target.recorded_sha256(relative)
    if not recorded or target.version is None:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the state is gone, and nothing proves what the original file was",
            where=str(target.file(relative)),
            expected="a wheel's RECORD or a git checkout",
            found=f"a {target.install} without either",
            next="reinstall this SGLang, or restore the file from where it came",
        )
    from mlapatch.install.wheels import WheelStore

    path = f"{target.package.name}/{relative}"
    data = WheelStore.default().files(target.version, [path]).files[path]
    if sha256(data) != recorded:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the wheel on the index is not the one that was installed",
            where=path,
            expected=f"sha256 {recorded[:16]} (RECORD)",
            found=f"sha256 {sha256(data)[:16]}",
            next="restore the file from the wheel that was installed",
        )
    return data
