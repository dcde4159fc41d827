# SPDX-License-Identifier: Apache-2.0
"""The operator library and the installed runtime work where there is no Python."""

import re
import subprocess
from pathlib import Path

import pytest

from ikbo._archive import read_manifest
from ikbo._load import ops_library_path

REPO = Path(__file__).resolve().parents[2]
BUILD = REPO / "build" / "cpu"


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env=env
    )


def succeed(*command: object) -> str:
    done = run(*command)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the consumer project against an installed ikbo."""
    folder = tmp_path_factory.mktemp("consumer")
    succeed("cmake", "--install", BUILD, "--prefix", folder / "prefix")
    succeed(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        REPO / "tests" / "tooling" / "consumer",
        "-B",
        folder / "build",
        f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}",
    )
    succeed("cmake", "--build", folder / "build")
    return folder


def test_library_has_no_undefined_python_symbol() -> None:
    undefined = succeed("nm", "-D", "--undefined-only", ops_library_path()).split()
    assert "aoti_torch_cpu_addmm_out" in undefined or "torch_call_dispatcher" in undefined, (
        "the list holds PyTorch's C shims, else it is not the list this test wants"
    )
    assert [name for name in undefined if name.startswith(("Py", "_Py"))] == []


def test_library_needs_no_python_library() -> None:
    dynamic = succeed("readelf", "-d", ops_library_path()).splitlines()
    needed = [line for line in dynamic if "(NEEDED)" in line]
    assert any("libtorch_cpu.so" in line for line in needed)
    assert [line for line in needed if "python" in line] == []


def test_library_loads_in_a_process_without_python(consumer: Path) -> None:
    assert succeed(consumer / "build" / "load_operators", ops_library_path()) == "loaded\n"


def test_installed_library_is_where_the_package_config_says(consumer: Path) -> None:
    library = (consumer / "build" / "ops_library.txt").read_text()
    assert Path(library).is_relative_to(consumer / "prefix")


def test_consumer_opens_packages_through_the_installed_runtime(consumer: Path) -> None:
    done = run(consumer / "build" / "open_package", consumer / "absent.pt2")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("ikbo::Error: ")
    assert "absent.pt2" in done.stdout


def test_c_example_runs_through_the_installed_library(
    consumer: Path, hand_written_package: Path
) -> None:
    build = consumer / "c-example"
    succeed("cmake", "-G", "Ninja", "-S", REPO / "examples" / "c", "-B", build,
            f"-DCMAKE_PREFIX_PATH={consumer / 'prefix'}")  # fmt: skip
    succeed("cmake", "--build", build)
    manifest = read_manifest(hand_written_package)
    text = succeed(build / "rank", hand_written_package, 3, ops_library_path())
    assert f"model {manifest.model_name}, version {manifest.model_version}\n" in text
    for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            assert f"{kind} {spec.name}: {spec.role} [B" in text
    for spec in manifest.outputs:
        rows = 1 if spec.role == "user" else 3
        one, two = (re.search(rf"request {i}, {re.escape(spec.name)}: (.*)", text) for i in (0, 1))
        assert one and two
        assert one[1].startswith(f"{rows} rows")
        assert two[1].startswith(f"{rows} rows")
    done = run(build / "rank", consumer / "absent.pt2", 3)
    assert done.returncode == 1
    assert "absent.pt2: cannot be opened as a .pt2 archive" in done.stderr


def test_c_library_exports_its_header_alone(consumer: Path) -> None:
    header = (consumer / "prefix" / "include" / "ikbo" / "ikbo.h").read_text()
    declared = set(re.findall(r"IKBO_API [^;(]*?\b(ikbo_\w+)\(", header))
    assert len(declared) > 10
    symbols = succeed("nm", "-D", "--defined-only", consumer / "prefix" / "lib" / "libikbo.so")
    exported = {line.split()[-1] for line in symbols.splitlines() if " T " in line}
    assert exported == declared


@pytest.mark.parametrize("program", ["ikbo-server", "ikbo-replay"])
def test_installed_programs_start_from_anywhere(consumer: Path, program: str) -> None:
    done = run(consumer / "prefix" / "bin" / program, "--help", env={})
    assert done.returncode == 0, done.stderr
    assert "--ops-library" in done.stdout


def test_public_headers_of_the_runtime_include_no_torch(consumer: Path) -> None:
    headers = sorted((consumer / "prefix" / "include" / "ikbo" / "runtime").glob("*.h"))
    assert [header.name for header in headers if header.name == "model.h"]
    for header in headers:
        assert "torch" not in "".join(
            line for line in header.read_text().splitlines() if line.startswith("#include")
        )
