"""The patch catalogue: folders of `patch.toml` and snippets, read as data. Nothing in them is ever executed."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from mlapatch.engine.form import PatchFormError
from mlapatch.engine.patch import Patch, load_patch, snippet_names
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMON = "common"
MAX_BYTES = 1 << 16
MAX_LINE = 1200  # of patch.toml: Python's parser takes quadratic time for a key of many parts


@dataclass(frozen=True)
class Catalogue:
    """Every patch by name, and the folder that it came from."""

    patches: dict[str, Patch]
    folders: dict[str, Path]

    @property
    def digest(self) -> str:
        """sha256 over the names and contents of all patches."""
        text = "\n".join(f"{name} {patch.digest}" for name, patch in sorted(self.patches.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, name: str) -> Patch:
        """The patch of that name; MlapatchError with the nearest name (exit 2) where there is none."""
        if name in self.patches:
            return self.patches[name]
        near = get_close_matches(name.lower(), self.patches, n=1, cutoff=0.4)
        together = [part for part in re.split(r"[,;\s]+", name) if part]
        if len(together) > 1:
            raise MlapatchError(
                Exit.USAGE,
                f"there is no patch '{name}'; names are separated by spaces",
                expected=", ".join(sorted(self.patches)),
                found=name,
                next=f"the same command with {' '.join(together)}",
            )
        raise MlapatchError(
            Exit.USAGE,
            f"there is no patch '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""),
            expected=", ".join(sorted(self.patches)),
            found=name,
            next="mlapatch list",
        )

    def ordered(self, names: Iterable[str]) -> list[Patch]:
        """The patches in the order in which they apply: `after` first, then by name."""
        wanted = {name: self.get(name) for name in names}
        done: list[Patch] = []
        while wanted:
            ready = sorted(n for n, p in wanted.items() if not any(a in wanted for a in p.after))
            if not ready:
                raise MlapatchError(
                    Exit.DOES_NOT_FIT,
                    f"the patches {', '.join(sorted(wanted))} wait for each other",
                    next="take one name out of their after lists; docs/patches.md describes the form",
                )
            done.append(wanted.pop(ready[0]))
        return done


def bundled_folder(name: str) -> Path:
    """`patches` or `scripts`: inside the wheel, or at the top of the checkout for an editable install."""
    here = Path(__file__).resolve().parent
    inside = here / "_data" / name
    return inside if inside.is_dir() else here.parents[1] / name


def load_catalogue(extra: Sequence[Path] | None = None) -> Catalogue:
    """The bundled patches, and those of `extra` folders, which replace bundled ones of the same name."""
    patches: dict[str, Patch] = {}
    folders: dict[str, Path] = {}
    for root in (bundled_folder("patches"), *(extra or ())):
        for folder in _patch_folders(root):
            patch = _load(folder, root)
            patches[patch.name], folders[patch.name] = patch, folder
    return Catalogue(patches, folders)


def _patch_folders(root: Path) -> list[Path]:
    if (root / "patch.toml").is_file():
        return [root]
    if not root.is_dir():
        raise MlapatchError(Exit.USAGE, "the patches folder does not exist", where=str(root), next="mlapatch list")
    found = sorted(item.parent for item in root.glob("*/patch.toml"))
    if not found:
        raise MlapatchError(
            Exit.USAGE,
            "the folder holds no patch",
            where=str(root),
            expected="NAME/patch.toml",
            found="none",
            next="name a folder of patches, or one patch's own folder; docs/patches.md describes the form",
        )
    return found


def _load(folder: Path, root: Path) -> Patch:
    path = folder / "patch.toml"
    try:
        text = _text(path, folder, root)
        if (longest := max(map(len, text.splitlines()), default=0)) > MAX_LINE:
            raise PatchFormError(f"{path} has a line of {longest:,} characters, and {MAX_LINE:,} are allowed")
        table = tomllib.loads(text)
        snippets = {name: _text(_snippet(name, folder, root), folder, root) for name in snippet_names(table)}
        patch = load_patch(table, snippets, where=str(path))
        if patch.name != folder.name:
            raise PatchFormError(f"{path}: the name {patch.name!r} is not the folder's, '{folder.name}'")
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: deep nesting, a link to itself
        raise MlapatchError(
            Exit.USAGE,
            "a patch cannot be read",
            where=str(path),
            found=str(error),
            next="mend the file; docs/patches.md describes the form",
        ) from None
    return patch


def _snippet(name: str, folder: Path, root: Path) -> Path:
    """`file.py` in the patch's own folder, or `common/file.py` in the folder of the catalogue or the bundled one."""
    parts = name.split("/")
    if len(parts) > 2 or ".." in parts or not parts[-1].endswith(".py") or Path(name).is_absolute():
        raise PatchFormError(f"{folder}: snippet {name!r:.120} must be FILE.py or {COMMON}/FILE.py")
    if len(parts) == 1:
        return folder / name
    if parts[0] != COMMON:
        raise PatchFormError(f"{folder}: snippet {name!r:.120} must be FILE.py or {COMMON}/FILE.py")
    own = root / name
    return own if own.is_file() else bundled_folder("patches") / name


def _text(path: Path, folder: Path, root: Path) -> str:
    allowed = [folder.resolve().parent, root.resolve(), bundled_folder("patches").resolve()]
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise PatchFormError(f"{path} is a link that leaves the catalogue")
    if not path.is_file():
        raise PatchFormError(f"{path} is not a file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise PatchFormError(f"{path} is larger than {MAX_BYTES} bytes")
    return data.decode("utf-8").replace("\r\n", "\n")
