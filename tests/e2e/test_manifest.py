# SPDX-License-Identifier: Apache-2.0
"""The manifest's text and the bytes of stored tensors."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ikbo._archive import read_manifest, tensor_bytes, tensor_from_bytes
from ikbo._manifest import DTYPES, KernelRun, Manifest, OpSchema, ReplayCase, TensorSpec

MANIFEST = Manifest(
    model_name="rank",
    model_version="2",
    torch_version="2.11.0",
    device="cpu",
    inputs=(TensorSpec("x", "float32", (-1, 3), "candidate"),),
    outputs=(TensorSpec("y", "float32", (-1,), "candidate"),),
    max_users=0,
    max_candidates=8,
    ops=(OpSchema("ikbo::bmm", "ikbo::bmm(Tensor a) -> Tensor"),),
    replay=(ReplayCase("one", 0, 1, ("i.bin",), ("o.bin",), 0.1, 0.2, (KernelRun("bmm", "k"),)),),
    spec={"rows": []},
)


def test_json_round_trip() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_compute_capability_is_for_gpus_alone() -> None:
    on_gpu = replace(MANIFEST, device="cuda", compute_capability=90)
    assert Manifest.from_json(on_gpu.to_json()) == on_gpu
    assert json.loads(on_gpu.to_json())["compute_capability"] == 90
    assert "compute_capability" not in json.loads(MANIFEST.to_json())


def test_another_format_version_is_refused() -> None:
    document = json.loads(MANIFEST.to_json()) | {"format_version": 3}
    with pytest.raises(ValueError, match=r"format_version must be one of \(1, 2\); got 3"):
        Manifest.from_json(json.dumps(document))


def test_another_hash_is_refused() -> None:
    document = json.loads(MANIFEST.to_json()) | {"ops_sha256": "0" * 64}
    with pytest.raises(ValueError, match="ops_sha256 must be that of its operators' schemas"):
        Manifest.from_json(json.dumps(document))


def test_hash_covers_the_schemas_that_are_used() -> None:
    """An operator more, or another schema, is another hash; the order of the list is not."""
    linear = OpSchema("ikbo::linear", "ikbo::linear(Tensor x) -> Tensor")
    both = replace(MANIFEST, ops=(*MANIFEST.ops, linear))
    changed = replace(MANIFEST, ops=(OpSchema("ikbo::bmm", "ikbo::bmm(Tensor b) -> Tensor"),))
    assert len({m.ops_sha256 for m in (MANIFEST, both, changed)}) == 3
    assert replace(both, ops=both.ops[::-1]).ops_sha256 == both.ops_sha256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 5])
def test_tensor_bytes_round_trip(dtype: str, rows: int) -> None:
    spec = TensorSpec("x", dtype, (-1, 3), "user")
    tensor = torch.randint(0, 2, (3, rows)).to(DTYPES[dtype]).t()
    back = tensor_from_bytes(tensor_bytes(tensor), spec)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_a_foreign_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match=r"not a \.pt2 archive"):
        read_manifest(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "3")
    with pytest.raises(ValueError, match=r"was it written by ikbo\.package"):
        read_manifest(path)
