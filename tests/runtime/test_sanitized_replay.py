# SPDX-License-Identifier: Apache-2.0
"""One real replay under ASan and UBSan: it runs the executor that other sanitized tests stub."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ikbo._archive import read_manifest
from tests.e2e.replay import REPOSITORY, replay

BUILD = REPOSITORY / "build" / "sanitize-replay"
BINARY = BUILD / "bin" / "ikbo-replay"
RUNTIME = BUILD / "lib" / "libikbo_runtime.so"
# What instrumented code calls when it finds something; `_abort`: and does not return.
INSTRUMENTED = (
    "__asan_report_load",
    "__asan_report_store",
    "__ubsan_handle_type_mismatch_v1_abort",
)
REPORTS = ("ERROR: AddressSanitizer", "ERROR: LeakSanitizer", "runtime error:")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    for file in (BINARY, RUNTIME):
        assert file.is_file(), f"{file} must exist; build it: tools/setup.sh sanitize-replay"


def test_the_runtime_is_instrumented() -> None:
    command = ["nm", "--dynamic", "--undefined-only", RUNTIME]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in INSTRUMENTED:
        assert name in symbols
    linked = subprocess.run(["ldd", BINARY], capture_output=True, text=True, check=True).stdout
    assert f"=> {RUNTIME.parent}/{RUNTIME.name}" in linked


def test_replays_without_a_report(
    transformed_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IKBO_REPLAY", str(BINARY))
    done = replay(transformed_package)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert not any(report in output for report in REPORTS), output
    cases = len(read_manifest(transformed_package).replay)
    assert done.stdout.endswith(f"\n{cases} passed, 0 failed\n")
