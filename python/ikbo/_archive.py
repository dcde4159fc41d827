# SPDX-License-Identifier: Apache-2.0
"""A package's manifest and replay tensors in its .pt2 archive.

The archive is torch's own; ikbo adds entries under `data/extra/ikbo/`: `manifest.json` and the
replay tensors. NOTE: torch's documented folder for extra files, `extra/`, cannot hold them: its
Python loader decodes every file there as UTF-8, and raw tensors are not text.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ikbo._manifest import (
    CANDIDATE_STAGE,
    DTYPES,
    USER_STAGE,
    FileDigest,
    Manifest,
    ReplayCase,
    TensorSpec,
)

EXTRA_ROOT = "data/extra/ikbo/"
MANIFEST_ENTRY = "extra/ikbo/manifest.json"


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major little-endian bytes of a tensor on any device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from_bytes(data: bytes, spec: TensorSpec) -> torch.Tensor:
    """The tensor that `tensor_bytes` wrote, its batch read from the number of bytes."""
    if not data:
        return torch.empty((0, *spec.shape[1:]), dtype=DTYPES[spec.dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[spec.dtype]).reshape(spec.shape)


def append_to_archive(
    path: str | os.PathLike[str], manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> Manifest:
    """Adds the replay tensors (entry below EXTRA_ROOT to tensor) and the manifest to a .pt2.

    Returns the manifest as it was written, with the digests of all that was there before it.
    """
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        root = _root_of(archive.namelist())
        for name, tensor in tensors.items():
            archive.writestr(f"{root}/{EXTRA_ROOT}{name}", tensor_bytes(tensor))
        files = tuple(FileDigest(name, entry_sha256(archive, name)) for name in archive.namelist())
        manifest = replace(manifest, files=files)
        archive.writestr(f"{root}/{EXTRA_ROOT}manifest.json", manifest.to_json())
    return manifest


def entry_sha256(archive: zipfile.ZipFile, name: str) -> str:
    """SHA-256 of an entry's bytes, in hex."""
    digest = hashlib.sha256()
    with archive.open(name) as entry:
        while block := entry.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _root_of(names: Sequence[str]) -> str:
    return names[0].split("/")[0]


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a package. Raises ValueError when the file is not an ikbo package."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            entry = f"{_root_of(names)}/{EXTRA_ROOT}manifest.json" if names else ""
            if entry not in names:
                raise ValueError(
                    f"{path}: no manifest ({MANIFEST_ENTRY}); was it written by ikbo.package?"
                )
            return Manifest.from_json(archive.read(entry).decode())
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: not a .pt2 archive: {error}") from error


def read_replay(
    path: str | os.PathLike[str], manifest: Manifest, case: ReplayCase
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The stored inputs and expected outputs of one replay case."""

    def load(
        archive: zipfile.ZipFile, names: Iterable[str], specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        root = _root_of(archive.namelist())
        return [
            tensor_from_bytes(archive.read(f"{root}/{EXTRA_ROOT}{name}"), spec)
            for name, spec in zip(names, specs, strict=True)
        ]

    with zipfile.ZipFile(path) as archive:
        return (
            load(archive, case.inputs, manifest.inputs),
            load(archive, case.outputs, manifest.outputs),
        )


class Staged:
    """A package in two stages in this process, through torch's own loader; called as one of one
    program is, with the inputs in order.

    Args:
        manifest: the package's.
        alone: whether the user stage runs for one user after the other, as it may in a server that
            keeps their states.
    """

    def __init__(
        self, path: str | os.PathLike[str], manifest: Manifest, *, alone: bool = False
    ) -> None:
        from torch.export.pt2_archive._package import load_pt2  # slow to import

        self._programs = load_pt2(os.fspath(path)).aoti_runners
        self._names = [spec.name for spec in manifest.inputs]
        reads = manifest.program_inputs
        self._users = [spec.name for spec in reads[USER_STAGE]]
        self._reads = [spec.name for spec in reads[CANDIDATE_STAGE] if spec in manifest.inputs]
        self._alone = alone

    def state(self, rows: Mapping[str, Tensor]) -> list[Tensor]:
        """What the user stage gives the candidate stage, of user inputs by name."""
        return list(self._programs[USER_STAGE](*(rows[name] for name in self._users)))

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        rows = dict(zip(self._names, inputs, strict=True))
        if self._alone:
            num_users = len(rows[self._users[0]])
            each = [
                self.state({name: rows[name][u : u + 1] for name in self._users})
                for u in range(num_users)
            ]
            state = [torch.cat(parts) for parts in zip(*each, strict=True)]
        else:
            state = self.state(rows)
        return list(self._programs[CANDIDATE_STAGE](*(rows[n] for n in self._reads), *state))
