# SPDX-License-Identifier: Apache-2.0
"""`ikbo.runtime`: packages run in this process through the C library."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ikbo import _c_api, runtime
from ikbo._archive import read_manifest, read_replay
from ikbo._dlpack import elements_of
from ikbo._manifest import Manifest
from tests.e2e.test_signing import make_key

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


def case_arrays(package: Path, manifest: Manifest, case: Any) -> tuple[dict, dict]:
    """Stored inputs and outputs as NumPy arrays."""
    inputs, outputs = read_replay(package, manifest, case)
    return (
        {s.name: x.numpy() for s, x in zip(manifest.inputs, inputs, strict=True)},
        {s.name: x.numpy() for s, x in zip(manifest.outputs, outputs, strict=True)},
    )


@pytest.fixture(scope="module")
def model(transformed_package: Path) -> runtime.Model:
    return runtime.Model(transformed_package, num_sessions=2)


@pytest.fixture(scope="module")
def manifest(transformed_package: Path) -> Manifest:
    return read_manifest(transformed_package)


def test_describes_its_package(model: runtime.Model, manifest: Manifest) -> None:
    assert (model.name, model.version) == (manifest.model_name, manifest.model_version)
    assert (model.max_users, model.max_candidates) == (manifest.max_users, manifest.max_candidates)
    assert model.device == "cpu"
    for ours, stored in zip(
        model.inputs + model.outputs, manifest.inputs + manifest.outputs, strict=True
    ):
        assert (ours.name, ours.dtype, ours.shape, ours.role) == (
            stored.name,
            stored.dtype,
            stored.shape,
            stored.role,
        )
        assert ours.values == (None if stored.values is None else tuple(stored.values))
    assert any(spec.values for spec in model.inputs)


def test_answers_as_the_stored_cases(
    model: runtime.Model, manifest: Manifest, transformed_package: Path
) -> None:
    assert manifest.replay
    for case in manifest.replay:
        inputs, expected = case_arrays(transformed_package, manifest, case)
        outputs = model(**inputs)
        assert list(outputs) == list(expected)
        for name, array in outputs.items():
            np.testing.assert_allclose(array, expected[name], rtol=case.rtol, atol=case.atol)


def test_answers_several_requests_in_one_run(
    model: runtime.Model, manifest: Manifest, transformed_package: Path
) -> None:
    small = [case for case in manifest.replay if case.num_users <= 4][:3]
    assert len(small) > 1
    cases = [case_arrays(transformed_package, manifest, case) for case in small]
    answers = model.run([inputs for inputs, _ in cases])
    for case, (_, expected), outputs in zip(small, cases, answers, strict=True):
        for name, array in outputs.items():
            np.testing.assert_allclose(array, expected[name], rtol=case.rtol, atol=case.atol)


def test_nothing_is_copied(
    model: runtime.Model,
    manifest: Manifest,
    transformed_package: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C gets the addresses of the caller's arrays, NumPy's and torch's; the caller gets C's."""
    library = _c_api.load(_c_api.library_path())
    given: list[int] = []
    made: list[int] = []

    def run(session: Any, requests: Any, count: int, result: Any) -> Any:
        given.extend(requests[0].inputs[i].data for i in range(requests[0].num_inputs))
        return library.ikbo_session_run(session, requests, count, result)

    def outputs_of(result: Any, request: int) -> Any:
        tensors = library.ikbo_result_get_outputs(result, request)
        made.extend(tensors[i].data for i in range(len(manifest.outputs)))
        return tensors

    monkeypatch.setattr(model._library, "ikbo_session_run", run)
    monkeypatch.setattr(model._library, "ikbo_result_get_outputs", outputs_of)
    inputs, _ = case_arrays(transformed_package, manifest, manifest.replay[-1])
    outputs = model(**inputs)
    assert given == [inputs[spec.name].ctypes.data for spec in manifest.inputs]
    assert made == [outputs[spec.name].ctypes.data for spec in manifest.outputs]

    given.clear()
    tensors = {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
    again = model(**tensors)
    assert given == [tensors[spec.name].data_ptr() for spec in manifest.inputs]
    for name, array in again.items():
        np.testing.assert_array_equal(array, outputs[name])


def test_outputs_outlive_the_model(transformed_package: Path, manifest: Manifest) -> None:
    case = manifest.replay[0]
    inputs, expected = case_arrays(transformed_package, manifest, case)
    model = runtime.Model(transformed_package)
    outputs = model(**inputs)
    del model
    gc.collect()
    for name, array in outputs.items():
        np.testing.assert_allclose(array, expected[name], rtol=case.rtol, atol=case.atol)
        assert array.base is not None


def test_the_index_of_one_user_may_be_left_out(
    model: runtime.Model, manifest: Manifest, transformed_package: Path
) -> None:
    case = next(case for case in manifest.replay if case.num_users == 1)
    inputs, expected = case_arrays(transformed_package, manifest, case)
    index = next(spec.name for spec in model.inputs if spec.role == "index")
    outputs = model(**{name: array for name, array in inputs.items() if name != index})
    for name, array in outputs.items():
        np.testing.assert_allclose(array, expected[name], rtol=case.rtol, atol=case.atol)


def test_many_threads(model: runtime.Model, manifest: Manifest, transformed_package: Path) -> None:
    cases = [case_arrays(transformed_package, manifest, case) for case in manifest.replay]
    alone = [model(**inputs) for inputs, _ in cases]

    def check(i: int) -> None:
        case = manifest.replay[i % len(cases)]
        for name, array in model(**cases[i % len(cases)][0]).items():
            expected = alone[i % len(cases)][name]
            np.testing.assert_allclose(array, expected, rtol=case.rtol, atol=case.atol)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, range(24)))


# A model that runs, its inputs and an exit handler that comes after the runtime's own.
CHILD = """
import atexit, os, sys, threading, time
import numpy as np
score = []
atexit.register(lambda: print(all(np.isfinite(x).all() for x in score), flush=True))
from ikbo.runtime import Model
model = Model(sys.argv[1], threads_per_run=2)
rows = {"user": 1, "candidate": 500, "index": 500}
inputs = {
    spec.name: np.full((rows[spec.role], *spec.shape[1:]), (spec.values or (0,))[0], spec.dtype)
    for spec in model.inputs
}
score.extend(model(**inputs).values())
"""


def run_child(package: Path, script: str) -> tuple[int, str]:
    command = [sys.executable, "-c", CHILD + script, str(package)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return child.returncode, child.stdout + child.stderr


def test_a_process_may_end_while_threads_run(transformed_package: Path) -> None:
    status, output = run_child(
        transformed_package,
        "def run():\n"
        "    while True: model(**inputs)\n"
        "for _ in range(3): threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(0.2)\n",
    )
    assert (status, output) == (0, "True\n")


def test_a_fork_does_not_run_its_parents_model(transformed_package: Path) -> None:
    status, output = run_child(
        transformed_package,
        "def run():\n"
        "    while True: model(**inputs)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(0.2)\n"
        "if os.fork() == 0:\n"
        "    try: model(**inputs)\n"
        "    except RuntimeError as error: print(error, flush=True)\n"
        "    sys.exit()\n"
        "assert os.wait()[1] == 0\n",
    )
    assert status == 0 and "must be run by the process that loaded it" in output, output


def test_refuses_inputs_that_do_not_fit(
    model: runtime.Model, manifest: Manifest, transformed_package: Path
) -> None:
    inputs, _ = case_arrays(transformed_package, manifest, manifest.replay[-1])
    first = next(spec for spec in model.inputs if spec.role == "user" and spec.dtype == "int64")
    with pytest.raises(TypeError, match=rf"missing \['{first.name}'\], unknown \['other'\]"):
        model(**{("other" if name == first.name else name): x for name, x in inputs.items()})
    wide = np.stack([inputs[first.name]] * 2, -1)
    with pytest.raises(RuntimeError, match=rf"input {first.name} must have shape"):
        model(**inputs | {first.name: wide})
    with pytest.raises(ValueError, match=rf"input {first.name} must be dense and row-major"):
        model(**inputs | {first.name: wide[..., 0]})
    with pytest.raises(RuntimeError, match=rf"input {first.name} must .*int64"):
        model(**inputs | {first.name: inputs[first.name].astype(np.int32)})
    with pytest.raises(ValueError, match=rf"input {first.name} must have shape .*; got a scalar"):
        model(**inputs | {first.name: np.array(1)})
    with pytest.raises(TypeError, match="must be a NumPy array or have __dlpack__"):
        model(**inputs | {first.name: [1, 2]})
    ranged = next(spec for spec in model.inputs if spec.values)
    assert ranged.values is not None
    outside = np.full_like(inputs[ranged.name], ranged.values[1] + 1)
    with pytest.raises(RuntimeError, match=rf"input {ranged.name} must have values in"):
        model(**inputs | {ranged.name: outside})
    model(**inputs)


def test_refuses_packages(transformed_package: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"/nowhere\.pt2: cannot be opened"):
        runtime.Model("/nowhere.pt2")
    _, public = make_key(tmp_path, "mine")
    with pytest.raises(RuntimeError, match="must be signed by a trusted key"):
        runtime.Model(transformed_package, trusted_keys=[public])
    old = tmp_path / "old.pt2"
    manifest = read_manifest(transformed_package)
    with zipfile.ZipFile(old, "w") as target:
        target.writestr("m/extra/ikbo/manifest.json", manifest.to_json())
    with pytest.raises(RuntimeError, match="which the manifest lists, is missing"):
        runtime.Model(old)
    with pytest.raises(ValueError, match="num_sessions must be at least 1; got 0"):
        runtime.Model(transformed_package, num_sessions=0)


@pytest.mark.parametrize("name", ["num_sessions", "threads_per_run", "cuda_graphs"])
def test_refuses_numbers_that_c_would_cut_off(transformed_package: Path, name: str) -> None:
    for number in (2**40, 2**31, 2**32 + 1):
        options: dict[str, Any] = {name: number}
        with pytest.raises(ValueError, match=f"{name} must have at most 32 bits; got {number}"):
            runtime.Model(transformed_package, **options)


@pytest.mark.parametrize(("name", "least"), [("num_sessions", 1), ("threads_per_run", 0)])
def test_refuses_more_than_a_machine_has_use_for(
    transformed_package: Path, name: str, least: int
) -> None:
    for number in (1025, 2**31 - 1):
        options: dict[str, Any] = {name: number}
        with pytest.raises(
            RuntimeError, match=f"{name} must be from {least} to 1024; got {number}"
        ):
            runtime.Model(transformed_package, **options)


def mapped_code() -> set[str]:
    """Compiled code of packages in this process, as the kernel calls the files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/data/aotinductor/" in line}


def test_what_was_unpacked_is_removed(transformed_package: Path) -> None:
    """A process that is killed, or ends with its models loaded, leaves nothing large."""
    before = mapped_code()
    model = runtime.Model(transformed_package)
    (code,) = mapped_code() - before
    assert code.endswith(" (deleted)")
    folder = Path("/", *Path(code).parts[1:3])
    assert folder.parent == Path("/tmp")
    assert list(folder.iterdir()) == []
    del model
    gc.collect()
    assert not folder.exists()


def test_names_the_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IKBO_C_LIBRARY", "/nowhere/libikbo.so")
    with pytest.raises(RuntimeError, match=r"must exist; tried /nowhere/libikbo\.so"):
        runtime.Model("model.pt2")


def test_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_c_api, "ABI_VERSION", 2)
    with pytest.raises(RuntimeError, match="must have ABI version 2; got 1"):
        runtime.Model("model.pt2")


def test_structs_are_those_of_the_header(tmp_path: Path) -> None:
    """Sizes and offsets, from the C compiler."""
    structs = {
        "ikbo_tensor_spec": _c_api.TensorSpec,
        "ikbo_package_info": _c_api.PackageInfo,
        "ikbo_package_options": _c_api.PackageOptions,
        "ikbo_model_options": _c_api.ModelOptions,
        "ikbo_tensor": _c_api.Tensor,
        "ikbo_request": _c_api.Request,
    }
    checks = [f'_Static_assert(IKBO_ABI_VERSION == {_c_api.ABI_VERSION}, "abi");']
    for name, struct in structs.items():
        checks.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");')
        for field, *_ in struct._fields_:
            offset = getattr(struct, field).offset
            checks.append(
                f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");'
            )
    for number, name in enumerate(_c_api.DTYPE_NAMES):
        checks.append(f'_Static_assert(IKBO_{name.upper()} == {number}, "{name}");')
    compile_c("\n".join(["#include <ikbo/ikbo.h>", *checks]), tmp_path)


def compile_c(text: str, folder: Path) -> None:
    import subprocess

    source = folder / "check.c"
    source.write_text(text + "\n")
    include = Path(__file__).resolve().parents[2] / "include"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*command, f"-I{include}", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_of_numpy_and_torch(dtype: str) -> None:
    array = np.ones((3, 4), dtype)
    found = elements_of("x", array)
    assert (found.address, found.dtype, found.shape) == (array.ctypes.data, dtype, (3, 4))
    assert found.num_bytes == array.nbytes
    tensor = torch.ones(5, 4, dtype=getattr(torch, dtype))[2:]
    found = elements_of("x", tensor)
    assert (found.address, found.dtype, found.shape) == (tensor.data_ptr(), dtype, (3, 4))
    assert found.num_bytes == tensor.nbytes


def test_elements_of_bfloat16_and_empty_tensors() -> None:
    tensor = torch.ones(3, 1, 4, dtype=torch.bfloat16)
    found = elements_of("x", tensor)
    assert (found.address, found.dtype) == (tensor.data_ptr(), "bfloat16")
    assert found.num_bytes == 24
    assert elements_of("x", torch.ones(0, 4)).num_bytes == 0
    # An extent of 1 has any stride.
    assert elements_of("x", torch.ones(4, 3).t()[:1].t()[:1]).num_bytes == 4


def test_elements_live_as_long_as_they_are_held() -> None:
    found = elements_of("x", torch.full((1000,), 7.0))
    gc.collect()
    values = (ctypes.c_float * 1000).from_address(found.address)
    assert set(values) == {7.0}


def test_elements_that_would_need_a_copy_are_refused() -> None:
    with pytest.raises(ValueError, match=r"strides \(1, 4\) with shape \(4, 3\): .contiguous"):
        elements_of("x", torch.ones(3, 4).t())
    with pytest.raises(ValueError, match="input x must be dense and row-major; got strides"):
        elements_of("x", np.ones((3, 4)).T)
    with pytest.raises(TypeError, match="input x must have a dtype of the package"):
        elements_of("x", np.ones(3, "complex64"))
    with pytest.raises(TypeError, match="input x must have a dtype of the package"):
        elements_of("x", np.ones(3, ">f4"))
    with pytest.raises(TypeError, match="got DLPack type code 5 with 64 bits"):
        elements_of("x", torch.ones(3, dtype=torch.complex64))
