# SPDX-License-Identifier: Apache-2.0
"""Digests and signatures of packages, as Python writes and checks them."""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ikbo._archive import append_to_archive, read_manifest
from ikbo._manifest import Manifest, TensorSpec
from ikbo.cli import main
from ikbo.signing import sign, verify

CODE = "m/data/aotinductor/model/code.so"
MANIFEST = "m/data/extra/ikbo/manifest.json"
SIGNATURE = "m/data/extra/ikbo/manifest.sig"


def make_key(folder: Path, name: str, *algorithm: str) -> tuple[Path, Path]:
    """A private and a public key."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    command = ["openssl", "genpkey", "-algorithm", *(algorithm or ("ed25519",)), "-out", private]
    subprocess.run(command, check=True, capture_output=True)
    command = ["openssl", "pkey", "-in", private, "-pubout", "-out", public]
    subprocess.run(command, check=True, capture_output=True)
    return private, public


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An archive as torch writes them, with a manifest but without real code."""
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(CODE, b"machine code")
        archive.writestr("m/version", b"0")
    spec = TensorSpec("x", "float32", (-1,), "candidate")
    manifest = Manifest("model", "1", torch.__version__, "cpu", (spec,), (spec,), 0, 8)
    written = append_to_archive(path, manifest, {"replay/a/input_0.bin": torch.ones(3)})
    assert written == read_manifest(path)
    return path


def rewritten(
    package: Path,
    edit: Callable[[dict[str, bytes]], object],
    repeat: tuple[str, bytes] | None = None,
) -> Path:
    """A copy whose entries `edit` has changed."""
    with zipfile.ZipFile(package) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    edit(entries)
    path = package.with_name("rewritten.pt2")
    with zipfile.ZipFile(path, "w") as target:
        for name, content in entries.items():
            target.writestr(name, content)
        if repeat is not None:
            target.writestr(*repeat)
    return path


def test_every_entry_but_the_manifest_has_its_digest(package: Path) -> None:
    files = {file.name: file.sha256 for file in read_manifest(package).files}
    with zipfile.ZipFile(package) as archive:
        assert set(files) == set(archive.namelist()) - {MANIFEST}
        for name, digest in files.items():
            assert digest == hashlib.sha256(archive.read(name)).hexdigest()


def test_a_real_package_has_digests(transformed_package: Path) -> None:
    files = verify(transformed_package).files
    assert any(file.name.endswith(".so") for file in files)
    assert any("/replay/" in file.name for file in files)


def test_signed_by_a_trusted_key(package: Path, tmp_path: Path) -> None:
    private, public = make_key(tmp_path, "mine")
    _, other = make_key(tmp_path, "other")
    before = package.read_bytes()
    sign(package, private)
    assert verify(package, [other, public]).model_name == "model"
    # Only an entry was added: whatever torch aligned in the archive is where it was.
    with zipfile.ZipFile(package) as archive:
        added = archive.getinfo(SIGNATURE).header_offset
    assert package.read_bytes()[:added] == before[:added]
    with pytest.raises(
        ValueError, match=r"its signature must be by one of the trusted keys, .*oth"
    ):
        verify(package, [other])


def test_unsigned_is_refused_where_keys_are_trusted(package: Path, tmp_path: Path) -> None:
    _, public = make_key(tmp_path, "mine")
    with pytest.raises(ValueError, match=r"must be signed; it holds no manifest\.sig"):
        verify(package, [public])


def test_signing_twice_is_refused(package: Path, tmp_path: Path) -> None:
    private, _ = make_key(tmp_path, "mine")
    sign(package, private)
    with pytest.raises(ValueError, match="must not be signed yet"):
        sign(package, private)


@pytest.mark.parametrize("algorithm", [("RSA",), ("ed448",)], ids=lambda names: names[0])
def test_keys_of_another_kind_are_refused(
    algorithm: tuple[str, ...], package: Path, tmp_path: Path
) -> None:
    private, public = make_key(tmp_path, "mine")
    other, other_public = make_key(tmp_path, "other", *algorithm)
    before = package.read_bytes()
    with pytest.raises(ValueError, match="must be a PEM file with an Ed25519 private key"):
        sign(package, other)
    with pytest.raises(ValueError, match="must be a PEM file with an Ed25519 private key"):
        sign(package, public)
    assert package.read_bytes() == before
    sign(package, private)
    with pytest.raises(ValueError, match="must be a PEM file with an Ed25519 public key"):
        verify(package, [other_public])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda entries: entries.update({CODE: b"other code"}), f"entry {CODE} must have the SHA"),
        (lambda entries: entries.pop(CODE), f"entry {CODE}, which the manifest lists, is missing"),
        (lambda entries: entries.update({"m/more.so": b""}), r"entry m/more\.so is not among"),
    ],
)
def test_changed_entries_are_refused(
    edit: Callable[[dict[str, bytes]], object], message: str, package: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        verify(rewritten(package, edit))


def test_an_entry_that_is_there_twice_is_refused(package: Path) -> None:
    """Readers differ in which of two they take, and in whether upper case is another name."""
    twice = rewritten(package, lambda entries: None, repeat=(CODE.upper(), b"other code"))
    with pytest.raises(ValueError, match="entries must have names of their own"):
        verify(twice)


def directory_of(archive: bytes) -> tuple[bytes, int]:
    """The directory, and the number of its entries; both are in the end record."""
    number, size, offset = struct.unpack("<HII", archive[-12:-2])
    return archive[offset : offset + size], number


def test_a_second_directory_is_refused(package: Path) -> None:
    """zipfile takes the one before the end record, others the one whose offset is in there."""
    archive = package.read_bytes()
    directory, number = directory_of(archive)
    size = len(directory)
    # Behind bytes that make all offsets larger than what zipfile will add to them.
    with zipfile.ZipFile(package) as read:
        moved = bytearray(directory)
        at = 0
        for entry in read.infolist():
            struct.pack_into("<I", moved, at + 42, entry.header_offset)
            at += 46 + len(entry.filename) + len(entry.extra)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, number, number, size, len(archive) - 22, 0)
    package.write_bytes(bytes(size) + archive[: -22 - size] + directory + moved + end)
    with pytest.raises(ValueError, match="must end with one directory and its end record"):
        verify(package)


def test_a_second_directory_of_64_bits_is_refused(package: Path) -> None:
    """zipfile takes the end record before the locator, others the one whose offset is in there."""
    archive = package.read_bytes()
    directory, number = directory_of(archive)
    start = len(archive) - 22 - len(directory)
    sizes = (44, 45, 45, 0, 0, number, number, len(directory), start)
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", *sizes)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    place = len(archive) - 22
    for shift in (0, -4):
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, place + shift, 1)
        package.write_bytes(archive[:-22] + record + locator + end)
        if shift == 0:
            verify(package)
    # Later versions of Python see it themselves.
    with pytest.raises(ValueError, match="must end with one directory|not a .pt2 archive"):
        verify(package)


def test_a_changed_manifest_is_not_signed(package: Path, tmp_path: Path) -> None:
    private, public = make_key(tmp_path, "mine")
    sign(package, private)
    changed = rewritten(
        package,
        lambda entries: entries.update({MANIFEST: entries[MANIFEST].replace(b'"1"', b'"2"')}),
    )
    assert verify(changed).model_version == "2"
    with pytest.raises(ValueError, match="its signature must be by one of the trusted keys"):
        verify(changed, [public])


def test_a_package_without_digests_is_refused(package: Path) -> None:
    def forget(entries: dict[str, bytes]) -> None:
        text = entries[MANIFEST].decode()
        entries[MANIFEST] = (text[: text.index(',\n "files"')] + "\n}").encode()

    with pytest.raises(ValueError, match="its manifest has no digests"):
        verify(rewritten(package, forget))


def test_command_line(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = make_key(tmp_path, "mine")
    assert main(["sign", str(package), "--key", str(private)]) == 0
    assert main(["verify", str(package), "--trusted-key", str(public)]) == 0
    assert "3 files as the manifest lists them, signed by a trusted key" in capsys.readouterr().out
    shutil.copy(rewritten(package, lambda entries: entries.pop(SIGNATURE)), package)
    assert main(["verify", str(package)]) == 0
    assert main(["verify", str(package), "--trusted-key", str(public)]) == 1
    assert "ikbo verify: " in capsys.readouterr().err
