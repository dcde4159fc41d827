# SPDX-License-Identifier: Apache-2.0
"""The manifest of a package: its fields and its JSON text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ikbo._value_ranges import ValueRange

# Of packages of one program, and of those in two stages.
ONE_PROGRAM, TWO_STAGES = FORMAT_VERSIONS = (1, 2)

# The programs of a package, by their folders in the archive.
MODEL, USER_STAGE, CANDIDATE_STAGE = "model", "user_stage", "candidate_stage"

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
class UserStage:
    """What the user stage of a package gives the candidate stage: `state`, tensors of role user,
    and `passed`, the names of the user inputs that the candidate stage reads as well.
    """

    state: tuple[TensorSpec, ...]
    passed: tuple[str, ...]


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
    """Stored inputs and expected outputs. `inputs` and `outputs` are entry names below the
    manifest's folder.

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
    user_stage: UserStage | None = None

    @property
    def program_inputs(self) -> dict[str, tuple[TensorSpec, ...]]:
        """What each program of the package takes."""
        stage = self.user_stage
        if stage is None:
            return {MODEL: self.inputs}
        reads = (x for x in self.inputs if x.role != USER or x.name in stage.passed)
        return {
            USER_STAGE: tuple(x for x in self.inputs if x.role == USER),
            CANDIDATE_STAGE: (*reads, *stage.state),
        }

    @property
    def ops_sha256(self) -> str:
        """SHA-256 of the operator schemas, sorted, each followed by a newline."""
        text = "".join(f"{schema}\n" for schema in sorted(op.schema for op in self.ops))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        stage = self.user_stage
        document = {
            "format_version": ONE_PROGRAM if stage is None else TWO_STAGES,
            "model": {"name": self.model_name, "version": self.model_version},
            "torch_version": self.torch_version,
            "device": self.device,
            **({"compute_capability": self.compute_capability} if self.compute_capability else {}),
            "inputs": [spec.document() for spec in self.inputs],
            "outputs": [spec.document() for spec in self.outputs],
            "max_users": self.max_users,
            "max_candidates": self.max_candidates,
            **({} if stage is None else {"user_stage": _stage_document(stage)}),
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
        if document.get("format_version") not in FORMAT_VERSIONS:
            raise ValueError(
                f"ikbo manifest: format_version must be one of {FORMAT_VERSIONS}; got "
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
            user_stage=_user_stage(document),
        )
        if document["ops_sha256"] != manifest.ops_sha256:
            raise ValueError(
                f"ikbo manifest: ops_sha256 must be that of its operators' schemas, "
                f"{manifest.ops_sha256}; got {document['ops_sha256']!r}"
            )
        return manifest


def _stage_document(stage: UserStage) -> dict[str, Any]:
    return {"state": [spec.document() for spec in stage.state], "passed": stage.passed}


def _user_stage(document: Mapping[str, Any]) -> UserStage | None:
    if document["format_version"] != TWO_STAGES:
        return None
    stage = document["user_stage"]
    return UserStage(tuple(_tensor_spec(spec) for spec in stage["state"]), tuple(stage["passed"]))


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
