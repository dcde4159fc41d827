# SPDX-License-Identifier: Apache-2.0
"""Signing packages with Ed25519, and checking what a package says of its own files.

A signature is of the manifest's bytes, which name the SHA-256 of every other entry. It is an entry
beside the manifest, `manifest.sig`: the 64 bytes that `openssl pkeyutl -sign -rawin` writes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ikbo._archive import MANIFEST_ENTRY, entry_sha256, read_manifest
from ikbo._manifest import Manifest

SIGNATURE_NAME = "manifest.sig"
_SIGNATURE_BYTES = 64
_END_BYTES, _LOCATOR64_BYTES, _END64_BYTES = 22, 20, 56  # of a zip file without a comment
_KEY_HELP = "`openssl genpkey -algorithm ed25519 -out key.pem` makes one"

PathLike = str | os.PathLike[str]


def sign(package: PathLike, key: PathLike) -> None:
    """Adds a signature to a package, which is replaced as a whole.

    Args:
        package: a package with digests and without a signature.
        key: PEM file of an Ed25519 private key.

    Errors:
        ValueError: the package is damaged, has no digests or is signed already; the key is of
            another kind.
        RuntimeError: there is no `openssl` command of version 3.
    """
    path = Path(package)
    verify(path)
    with zipfile.ZipFile(path) as archive:
        manifest_name = _manifest_name(path, archive)
        name = _signature_name(manifest_name)
        if name in archive.namelist():
            raise ValueError(f"{path}: must not be signed yet; it holds {name}")
        signature = _signature(archive.read(manifest_name), key)
    draft = path.with_name(f".{path.stem}.{os.getpid()}.pt2")
    try:
        shutil.copyfile(path, draft)
        shutil.copymode(path, draft)
        with zipfile.ZipFile(draft, "a", zipfile.ZIP_STORED) as archive:
            archive.writestr(name, signature)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def verify(package: PathLike, trusted_keys: Sequence[PathLike] = ()) -> Manifest:
    """Checks the digests of a package and, where keys are given, its signature.

    Args:
        package: the file.
        trusted_keys: PEM files of Ed25519 public keys, of which one must have signed the package.

    Returns:
        The manifest.

    Errors:
        ValueError: an entry that is absent, not listed, listed or stored twice, or not as listed; a
            package without digests; without a signature by one of the keys.
        RuntimeError: there is no `openssl` command of version 3.
    """
    path = Path(package)
    manifest = read_manifest(path)
    with zipfile.ZipFile(path) as archive:
        _check_directory(path, archive)
        manifest_name = _manifest_name(path, archive)
        _check_files(path, archive, manifest, manifest_name)
        if trusted_keys:
            _check_signature(path, archive, manifest_name, trusted_keys)
    return manifest


def _check_directory(path: Path, archive: zipfile.ZipFile) -> None:
    """Of an archive with two directories, zipfile takes the one that lies before the end record,
    and other readers the one whose offset is in there.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - _END64_BYTES - _LOCATOR64_BYTES - _END_BYTES, 0))
        tail = file.read()
    end, locator = tail[-_END_BYTES:], tail[-_END_BYTES - _LOCATOR64_BYTES : -_END_BYTES]
    is_one = end.startswith(b"PK\5\6")  # else there is a comment
    offset = int.from_bytes(end[16:20], "little")
    if locator.startswith(b"PK\6\7"):
        is_one &= int.from_bytes(locator[8:16], "little") == size - len(tail)
        offset = int.from_bytes(tail[48:56], "little")
    if not is_one or offset != archive.start_dir:
        raise ValueError(
            f"{path}: must end with one directory and its end record, which says that it is at "
            f"{archive.start_dir}; got {offset}: package the model again"
        )
    for entry in archive.infolist():
        if entry.filename != entry.orig_filename:
            raise ValueError(
                f"{path}: entries must have one name each; {entry.orig_filename!r} is also "
                f"{entry.filename!r}"
            )


def _manifest_name(path: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if name.endswith(f"/{MANIFEST_ENTRY}")]
    if len(names) != 1:
        raise ValueError(f"{path}: must hold one {MANIFEST_ENTRY}; got {names}")
    return names[0]


def _signature_name(manifest_name: str) -> str:
    return f"{manifest_name.rpartition('/')[0]}/{SIGNATURE_NAME}"


def _check_files(
    path: Path, archive: zipfile.ZipFile, manifest: Manifest, manifest_name: str
) -> None:
    if not manifest.files:
        raise ValueError(
            f"{path}: its manifest has no digests (`files`): package the model again with this "
            "version of ikbo"
        )
    listed = {file.name: file.sha256 for file in manifest.files}
    names = archive.namelist()
    unlisted = {manifest_name, _signature_name(manifest_name)}
    if len(listed) != len(manifest.files) or len({name.lower() for name in names}) != len(names):
        raise ValueError(f"{path}: entries must have names of their own; some are there twice")
    for name in names:
        if name not in listed and name not in unlisted:
            raise ValueError(f"{path}: entry {name} is not among `files` of the manifest")
    for name, expected in listed.items():
        if name not in names:
            raise ValueError(f"{path}: entry {name}, which the manifest lists, is missing")
        actual = entry_sha256(archive, name)
        if actual != expected:
            raise ValueError(f"{path}: entry {name} must have the SHA-256 {expected}; got {actual}")


def _check_signature(
    path: Path, archive: zipfile.ZipFile, manifest_name: str, trusted_keys: Sequence[PathLike]
) -> None:
    name = _signature_name(manifest_name)
    if name not in archive.namelist():
        raise ValueError(f"{path}: must be signed; it holds no {SIGNATURE_NAME}")
    with tempfile.TemporaryDirectory() as folder:
        text, signature = Path(folder, "manifest"), Path(folder, "signature")
        text.write_bytes(archive.read(manifest_name))
        signature.write_bytes(archive.read(name))
        for key in trusted_keys:
            _check_key(key, public=True)
            options = ("-pubin", "-inkey", key, "-in", text, "-sigfile", signature)
            if _openssl("pkeyutl", "-verify", "-rawin", *options).returncode == 0:
                return
    keys = ", ".join(str(key) for key in trusted_keys)
    raise ValueError(f"{path}: its signature must be by one of the trusted keys, {keys}; it is not")


def _signature(text: bytes, key: PathLike) -> bytes:
    _check_key(key, public=False)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "manifest"), Path(folder, "signature")
        source.write_bytes(text)
        done = _openssl("pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", source, "-out", target)
        signature = target.read_bytes() if done.returncode == 0 else b""
    if len(signature) != _SIGNATURE_BYTES:
        raise RuntimeError(
            f"openssl 3 must sign with {key}; it ended with status {done.returncode}: {done.stderr}"
        )
    return signature


def _check_key(key: PathLike, *, public: bool) -> None:
    kind = "public" if public else "private"
    options = ("-pubin", "-text_pub") if public else ("-text",)
    done = _openssl("pkey", "-in", key, "-noout", *options)
    if done.returncode != 0 or not done.stdout.upper().startswith("ED25519"):
        raise ValueError(
            f"key must be a PEM file with an Ed25519 {kind} key ({_KEY_HELP}); got {key}: "
            f"{done.stderr.strip() or done.stdout.partition(chr(10))[0]}"
        )


def _openssl(*arguments: PathLike) -> subprocess.CompletedProcess[str]:
    command = ["openssl", *(os.fspath(argument) for argument in arguments)]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(
            "signatures need the command `openssl` (version 3) on PATH; there is none"
        ) from error
