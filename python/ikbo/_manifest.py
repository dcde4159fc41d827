# SPDX-License-Identifier: Apache-2.0
"""The manifest of a package: its fields, its JSON text and its place in the .pt2 archive.

The archive is torch's own; ikbo adds entries under `data/extra/ikbo/`: `manifest.json` and the
replay tensors. NOTE: torch's documented folder for extra files, `extra/`, cannot hold them: its
Python loader decodes every file there as UTF-8, and raw tensors are not text.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ikbo._value_ranges import ValueRange

FORMAT_VERSION = 1
EXTRA_ROOT = "data/extra/ikbo/"
MANIFEST_ENTRY = "extra/ikbo/manifest.json"

USER, CANDIDATE, INDEX = "user", "candidate", "index"
ROLES = (USER, CANDIDATE, INDEX)

# In a kernel's place: the operator runs as a sequence of PyTorch's own.
COMPOSITE = "composite"

DTYPE_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. `shape[0]` is -1, the batch that `role` names; `values` are those that
    an integer input may have, where the compiled code relies on it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    values: ValueRange | None = None

    def layout(self) -> str:
        """What compiled code depends on: "float32 [-1, 3]"."""
        return f"{self.dtype} {list(self.shape)}"

    def document(self) -> dict[str, Any]:
        fields = {"name": self.name, "dtype": self.dtype, "shape": self.shape, "role": self.role}
        return fields if self.values is None else {**fields, "values": self.values._asdict()}


@dataclass(frozen=True)
class OpSchema:
    """One ikbo operator that the package calls, with the schema that it was compiled against."""

    name: str
    schema: str


@dataclass(frozen=True)
class KernelRun:
    """The kernel that an operator call chooses, or `COMPOSITE`."""

    op: str
    kernel: str


@dataclass(frozen=True)
class ReplayCase:
    """Stored inputs and expected outputs. `inputs` and `outputs` are entry names below
    `EXTRA_ROOT`.

    An output passes when |actual - expected| <= atol + rtol * |expected|. `kernels` are the
    launches that a run must make; an operator that runs as a composite makes none.
    """

    id: str
    num_users: int
    num_candidates: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    atol: float
    rtol: float
    kernels: tuple[KernelRun, ...] = ()


@dataclass(frozen=True)
class FileDigest:
    """An entry of the archive, by its whole name, and the SHA-256 of its bytes in hex."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a package says of itself. `max_users` 0: it has no user inputs and no index.

    `compute_capability` is that of the GPU that the package was compiled for, 90 for 9.0; None on
    the CPU. `files` are all entries of the archive but the manifest and its signature; none before
    the package is written.
    """

    model_name: str
    model_version: str
    torch_version: str
    device: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_users: int
    max_candidates: int
    ops: tuple[OpSchema, ...] = ()
    replay: tuple[ReplayCase, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)
    compute_capability: int | None = None
    files: tuple[FileDigest, ...] = ()

    @property
    def ops_sha256(self) -> str:
        """SHA-256 of the operator schemas, sorted, each followed by a newline."""
        text = "".join(f"{schema}\n" for schema in sorted(op.schema for op in self.ops))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        document = {
            "format_version": FORMAT_VERSION,
            "model": {"name": self.model_name, "version": self.model_version},
            "torch_version": self.torch_version,
            "device": self.device,
            **({"compute_capability": self.compute_capability} if self.compute_capability else {}),
            "inputs": [spec.document() for spec in self.inputs],
            "outputs": [spec.document() for spec in self.outputs],
            "max_users": self.max_users,
            "max_candidates": self.max_candidates,
            "ops": [asdict(op) for op in self.ops],
            "ops_sha256": self.ops_sha256,
            "replay": [asdict(case) for case in self.replay],
            "spec": self.spec,
            **({"files": [asdict(file) for file in self.files]} if self.files else {}),
        }
        return json.dumps(document, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Parses a manifest that `to_json` wrote. Raises ValueError on another format version."""
        document = json.loads(text)
        if document.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"ikbo manifest: format_version must be {FORMAT_VERSION}; got "
                f"{document.get('format_version')!r}; package the model again with this version "
                "of ikbo"
            )
        manifest = Manifest(
            model_name=document["model"]["name"],
            model_version=document["model"]["version"],
            torch_version=document["torch_version"],
            device=document["device"],
            inputs=tuple(_tensor_spec(spec) for spec in document["inputs"]),
            outputs=tuple(_tensor_spec(spec) for spec in document["outputs"]),
            max_users=document["max_users"],
            max_candidates=document["max_candidates"],
            ops=tuple(OpSchema(**op) for op in document["ops"]),
            replay=tuple(_replay_case(case) for case in document["replay"]),
            spec=document["spec"],
            compute_capability=document.get("compute_capability"),
            files=tuple(FileDigest(**file) for file in document.get("files", ())),
        )
        if document["ops_sha256"] != manifest.ops_sha256:
            raise ValueError(
                f"ikbo manifest: ops_sha256 must be that of its operators' schemas, "
                f"{manifest.ops_sha256}; got {document['ops_sha256']!r}"
            )
        return manifest


def _tensor_spec(document: Mapping[str, Any]) -> TensorSpec:
    values = document.get("values")
    return TensorSpec(
        **{
            **document,
            "shape": tuple(document["shape"]),
            "values": None if values is None else ValueRange(**values),
        }
    )


def _replay_case(document: Mapping[str, Any]) -> ReplayCase:
    return ReplayCase(
        **{
            **document,
            "inputs": tuple(document["inputs"]),
            "outputs": tuple(document["outputs"]),
            "kernels": tuple(KernelRun(**run) for run in document["kernels"]),
        }
    )


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
