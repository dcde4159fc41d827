# SPDX-License-Identifier: Apache-2.0
"""`ikbo-replay` on a real package and on packages that do not fit the process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ikbo._archive import read_manifest
from ikbo.signing import sign
from tests.e2e.replay import replay, replay_binary
from tests.e2e.test_signing import make_key

MANIFEST = "extra/ikbo/manifest.json"


def edited(
    package: Path,
    path: Path,
    edit: Callable[[dict[str, Any]], object],
    edit_entry: Callable[[str, bytes], bytes | None] = lambda name, content: content,
) -> Path:
    """A copy of the package with its manifest changed, or its other entries; None drops one."""
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith(MANIFEST):
                document = json.loads(content)
                edit(document)
                content = json.dumps(document).encode()
            elif (changed := edit_entry(entry.filename, content)) is None:
                continue
            else:
                content = changed
            target.writestr(entry.filename, content)
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [replay_binary(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@dataclass(frozen=True)
class Refusal:
    id: str
    edit: Callable[[dict[str, Any]], object]
    message: str


def op(document: dict[str, Any]) -> dict[str, Any]:
    (entry,) = (op for op in document["ops"] if op["name"] == "ikbo::target_attention")
    return entry


REFUSALS = [
    Refusal(
        "other_schema",
        lambda document: op(document).update(schema="ikbo::target_attention(Tensor q) -> Tensor"),
        "was compiled against ikbo::target_attention(Tensor q) -> Tensor; operator library",
    ),
    Refusal(
        "absent_op",
        lambda document: op(document).update(name="ikbo::absent.overload"),
        "calls ikbo::absent.overload, which operator library",
    ),
    Refusal(
        "other_torch",
        lambda document: document.update(torch_version="2.99.0+cpu"),
        "was compiled by torch 2.99.0+cpu; this runtime is built with torch",
    ),
    Refusal(
        "other_input_shape",
        lambda document: document["inputs"][1].update(shape=[-1, 13]),
        "input history must be int64 [-1, 12], as the code was compiled for; the manifest says "
        "int64 [-1, 13]",
    ),
    Refusal(
        "other_input_dtype",
        lambda document: document["inputs"][4].update(dtype="float64"),
        "input price must be float32 [-1, 4], as the code was compiled for; the manifest says "
        "float64 [-1, 4]",
    ),
    Refusal(
        "unlisted_op",
        lambda document: document.update(ops=[]),
        "the code calls ikbo::target_attention, which ops of the manifest must list",
    ),
    Refusal(
        "no_cases",
        lambda document: document.update(replay=[]),
        "stores no replay cases",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refuses_a_package_that_does_not_fit(
    refusal: Refusal, transformed_package: Path, tmp_path: Path
) -> None:
    package = edited(transformed_package, tmp_path / "edited.pt2", refusal.edit)
    done = replay(package)
    assert done.returncode == 2, done.stdout
    assert f"{package}: {refusal.message}" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_needs_a_gpu_for_a_package_for_one(transformed_package: Path, tmp_path: Path) -> None:
    def move(document: dict[str, Any]) -> None:
        document.update(device="cuda", compute_capability=90)

    package = edited(transformed_package, tmp_path / "edited.pt2", move)
    done = replay(package)
    assert done.returncode == 2, done.stdout
    assert f"{package}: was compiled for device cuda and needs a GPU; " in done.stderr


def test_names_a_package_without_code(transformed_package: Path, tmp_path: Path) -> None:
    def forget_code(document: dict[str, Any]) -> None:
        document["files"] = [f for f in document["files"] if not f["name"].endswith(".so")]

    package = edited(
        transformed_package,
        tmp_path / "empty.pt2",
        forget_code,
        lambda name, content: None if name.endswith(".so") else content,
    )
    done = replay(package)
    assert done.returncode == 2, done.stdout
    assert f"{package}: holds no compiled code (data/aotinductor/model/*.so)" in done.stderr


def test_refuses_code_that_was_changed(transformed_package: Path, tmp_path: Path) -> None:
    """Every other check passes: the archive's own checksums are right."""

    def change(name: str, content: bytes) -> bytes:
        return content[:-1] + b"x" if name.endswith(".so") else content

    package = edited(transformed_package, tmp_path / "e.pt2", lambda document: None, change)
    done = replay(package)
    assert done.returncode == 2, done.stdout
    assert re.search(rf'{package}: entry "[^"]+\.so" must have the SHA-256', done.stderr)


def test_packages_of_earlier_versions(transformed_package: Path, tmp_path: Path) -> None:
    package = edited(transformed_package, tmp_path / "old.pt2", lambda d: d.pop("files"))
    done = replay(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{package}: its manifest lists no digests" in done.stderr
    done = replay(package, "--require-digests")
    assert done.returncode == 2
    assert "its manifest must list the digests of its files; it has none" in done.stderr


def test_trusts_a_key(transformed_package: Path, tmp_path: Path) -> None:
    """What Python signs, C++ accepts; and nothing else."""
    key, public = make_key(tmp_path, "mine")
    _, other = make_key(tmp_path, "other")
    package = Path(shutil.copy(transformed_package, tmp_path / "signed.pt2"))
    done = replay(package, "--trusted-key", public)
    assert done.returncode == 2
    assert f"{package}: must be signed by a trusted key; it holds no manifest.sig" in done.stderr
    sign(package, key)
    done = replay(package, "--trusted-key", other, "--trusted-key", public)
    assert done.returncode == 0, done.stdout + done.stderr
    done = replay(package, "--trusted-key", other)
    assert done.returncode == 2
    assert f"{package}: must be signed by a trusted key; its manifest.sig is by" in done.stderr


def test_refuses_a_truncated_package(transformed_package: Path, tmp_path: Path) -> None:
    package = tmp_path / "truncated.pt2"
    package.write_bytes(transformed_package.read_bytes()[:-1000])
    done = replay(package)
    assert done.returncode == 2
    assert f"{package}: cannot be opened as a .pt2 archive" in done.stderr


def test_names_the_operator_library_that_is_missing(transformed_package: Path) -> None:
    done = run(transformed_package)
    assert done.returncode == 2
    assert "an operator library (libikbo_ops.so) must be given; got none" in done.stderr
    done = run(transformed_package, "--ops-library", "/nowhere/libikbo_ops.so")
    assert done.returncode == 2
    assert 'operator library "/nowhere/libikbo_ops.so" cannot be opened' in done.stderr
    done = run(transformed_package, "--ops-library", transformed_package)
    assert done.returncode == 2
    assert f"operator library {transformed_package} cannot be loaded" in done.stderr


def test_fails_when_another_kernel_ran(transformed_package: Path, tmp_path: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        document["replay"][0]["kernels"][0]["kernel"] = "another"

    package = edited(transformed_package, tmp_path / "edited.pt2", rename)
    done = replay(package)
    cases = len(read_manifest(package).replay)
    assert done.returncode == 1, done.stderr
    assert "must run kernel another as the compilation spec says" in done.stdout
    assert done.stdout.endswith(f"\n{cases - 1} passed, 1 failed\n")


def test_holds_inputs_to_their_values(transformed_package: Path, tmp_path: Path) -> None:
    """A range that the stored rows leave: what reaches compiled code is checked first."""

    def narrow(document: dict[str, Any]) -> None:
        spec = next(spec for spec in document["inputs"] if spec["dtype"] == "int64")
        spec["values"] = {"min": -2, "max": -1}

    done = replay(edited(transformed_package, tmp_path / "edited.pt2", narrow))
    assert done.returncode == 1, done.stderr
    assert "must have values in [-2, -1]; got" in done.stdout


def test_replays_the_cases_named(transformed_package: Path) -> None:
    first = read_manifest(transformed_package).replay[0].id
    done = replay(transformed_package, "--case", first, "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n1 passed, 0 failed\n")
    done = replay(transformed_package, "--case", "unknown")
    assert done.returncode == 2
    assert 'has no replay case "unknown"' in done.stderr


def test_help_is_complete() -> None:
    done = run("--help")
    assert done.returncode == 0
    for option in ("model", "--ops-library", "--threads", "--case", "Exit status"):
        assert option in done.stdout
    assert run().returncode == 2
    assert run("model.pt2", "--unknown").returncode == 2


def test_needs_neither_python_nor_cuda_libraries_of_torch() -> None:
    linked = subprocess.run(["ldd", replay_binary()], capture_output=True, text=True, check=True)
    assert "libtorch_cpu.so" in linked.stdout
    for library in ("libpython", "libtorch_python", "libtorch_cuda", "libcublas", "libcudnn"):
        assert library not in linked.stdout
