# SPDX-License-Identifier: Apache-2.0
"""What is in a package, and that it computes what its module computes."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ikbo
from ikbo._archive import MANIFEST_ENTRY, read_manifest, read_replay
from ikbo.transform import TransformedModule
from tests.e2e.models import hand_written, history_ranker
from tests.e2e.replay import assert_replays_here, replay, run

PACKAGES = ["transformed_package", "hand_written_package", "opaque_package"]


@pytest.mark.parametrize("name", PACKAGES)
def test_replays_in_cpp(name: str, request: pytest.FixtureRequest) -> None:
    package = request.getfixturevalue(name)
    done = replay(package)
    cases = len(read_manifest(package).replay)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases} passed, 0 failed" in done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_stored_tensors_replay_in_python(name: str, request: pytest.FixtureRequest) -> None:
    assert_replays_here(request.getfixturevalue(name))


def test_replay_cases_cover_the_awkward_batches(transformed_package: Path) -> None:
    manifest = read_manifest(transformed_package)
    sizes = {(case.num_users, case.num_candidates) for case in manifest.replay}
    assert (1, 1) in sizes
    indices = {}
    position = [spec.role for spec in manifest.inputs].index("index")
    for case in manifest.replay:
        inputs, _ = read_replay(transformed_package, manifest, case)
        indices[case.id] = inputs[position]
        assert len(inputs[position]) == case.num_candidates
    counts = {
        case.id: torch.bincount(indices[case.id], minlength=case.num_users)
        for case in manifest.replay
    }
    assert any((index.diff() < 0).any() for index in indices.values()), "no shuffled case"
    assert any((count == 0).any() for count in counts.values()), "no user without candidates"
    assert any(count.max() > 10 * count.min() > 0 for count in counts.values()), "none uneven"


def test_transformed_package_equals_the_unmodified_model(transformed_package: Path) -> None:
    """At the largest sizes of the package, with user rows repeated for the unmodified model."""
    model, example = history_ranker()
    manifest = read_manifest(transformed_package)
    num_users, num_candidates = manifest.max_users, manifest.max_candidates
    assert (num_users, num_candidates) == (16, 2048)
    cand_to_user = torch.randint(num_users, (num_candidates,), dtype=torch.int32)
    pick = torch.randint(len(example["item_id"]), (num_candidates,))
    inputs, repeated = [], {}
    for spec in manifest.inputs:
        if spec.role == "index":
            inputs.append(cand_to_user)
            continue
        rows = example[spec.name][:num_users] if spec.role == "user" else example[spec.name][pick]
        inputs.append(rows)
        repeated[spec.name] = rows[cand_to_user] if spec.role == "user" else rows
    with torch.no_grad():
        expected = model(**repeated)
    for spec, actual in zip(manifest.outputs, run(transformed_package, inputs), strict=True):
        torch.testing.assert_close(actual, expected[spec.name], rtol=1e-4, atol=1e-5)


def test_manifest_of_a_transformed_module(
    transformed: TransformedModule, transformed_package: Path
) -> None:
    manifest = read_manifest(transformed_package)
    assert (manifest.model_name, manifest.model_version) == ("model", "7")
    assert (manifest.torch_version, manifest.device) == (torch.__version__, "cpu")
    assert {spec.name: spec.role for spec in manifest.inputs} == transformed.roles
    assert [(s.name, s.dtype, s.shape, s.role) for s in manifest.outputs] == [
        ("click", "float32", (-1,), "candidate"),
        ("like", "float32", (-1,), "candidate"),
    ]
    schema = str(torch.ops.ikbo.target_attention.default._schema)
    assert [(op.name, op.schema) for op in manifest.ops] == [("ikbo::target_attention", schema)]
    assert manifest.spec["rows"]


def test_replay_names_the_kernels_of_the_spec(transformed_package: Path) -> None:
    manifest = read_manifest(transformed_package)
    ranges = [kernel for row in manifest.spec["rows"] for kernel in row["kernels"]]
    attention = [kernel for kernel in ranges if kernel["op"] == "ikbo::target_attention"]
    for case in manifest.replay:
        named = [
            kernel["kernel"]
            for kernel in attention
            if kernel["users"][0] <= case.num_users <= kernel["users"][1]
            and kernel["candidates"][0] <= case.num_candidates <= kernel["candidates"][1]
        ]
        assert [("target_attention", kernel) for kernel in named] == [
            (run.op, run.kernel) for run in case.kernels
        ]


def test_replay_fails_when_an_output_is_wrong(transformed_package: Path, tmp_path: Path) -> None:
    """One flipped byte in a stored output is a failed case, not a passed one."""
    broken = tmp_path / "broken.pt2"
    manifest = read_manifest(transformed_package)
    case = manifest.replay[0]
    with zipfile.ZipFile(transformed_package) as source, zipfile.ZipFile(broken, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith(case.outputs[0]):
                data = data[:-1] + bytes([data[-1] ^ 0x40])
            elif entry.filename.endswith(MANIFEST_ENTRY):
                data = replace(manifest, files=()).to_json().encode()
            target.writestr(entry, data)
    done = replay(broken)
    assert done.returncode == 1
    assert f"{len(read_manifest(broken).replay) - 1} passed, 1 failed" in done.stdout


def test_nested_inputs_and_outputs_have_names(hand_written_package: Path) -> None:
    manifest = read_manifest(hand_written_package)
    recipe = hand_written(ikbo.expand)
    assert {spec.name: spec.role for spec in manifest.inputs} == recipe.roles
    assert [spec.dtype for spec in manifest.inputs] == [
        "float32", "bool", "float32", "int16", "int32",
    ]  # fmt: skip
    assert [(s.name, s.dtype, s.shape, s.role) for s in manifest.outputs] == [
        ("score", "float32", (-1,), "candidate"),
        ("parts.0", "float32", (-1, 6), "candidate"),
        ("parts.1", "bool", (-1,), "candidate"),
        ("exact", "float64", (-1, 4), "candidate"),
        ("fields", "float32", (-1, 5, 2), "candidate"),
        ("profile", "float32", (-1, 8), "user"),
    ]


def test_lists_and_packed_weights_are_called_whole(hand_written_package: Path) -> None:
    """Candidate embeddings in parts and packed weights reach our kernels. A constant is packed when
    the package is compiled, not when it is called."""
    manifest = read_manifest(hand_written_package)
    called = {"ikbo::linear.prepacked", "ikbo::lce.list", "ikbo::lce.prepacked"}
    assert called <= {op.name for op in manifest.ops}
    for case in manifest.replay:
        assert [run.op for run in case.kernels].count("lce") == 2
    with zipfile.ZipFile(hand_written_package) as archive:
        [calls] = [name for name in archive.namelist() if name.endswith(".wrapper.json")]
        code = archive.read(calls).decode()
    assert all(f'"{name}"' in code for name in called)
    assert '"ikbo::prepack"' not in code


def test_weights_that_are_views_do_not_bloat_the_package(hand_written_package: Path) -> None:
    """The module's weights are 2 KB of an 800 KB buffer."""
    with zipfile.ZipFile(hand_written_package) as archive:
        code = sum(info.file_size for info in archive.infolist() if "aotinductor" in info.filename)
    assert code < 600_000


def test_archive_needs_no_libtorch_with_cuda(hand_written_package: Path, tmp_path: Path) -> None:
    """A CPU package links libtorch_cpu alone; libtorch would load the CUDA libraries."""
    with zipfile.ZipFile(hand_written_package) as archive:
        [library] = [name for name in archive.namelist() if name.endswith(".so")]
        code = archive.read(library)
    assert b"libtorch_cpu.so" in code
    assert b"libtorch.so" not in code
