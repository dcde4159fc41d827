# SPDX-License-Identifier: Apache-2.0
"""The wheel: what it holds, and that it works in another environment that has PyTorch."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

USE = """
import torch, ikbo
from ikbo._load import ops_library_path
x_user, x_cand = torch.randn(2, 3), torch.randn(5, 4)
w_user, w_cand = torch.randn(6, 3), torch.randn(6, 4)
index = ikbo.CandidateIndex.from_counts([2, 3]).cand_to_user
out = ikbo.linear(x_user, x_cand, w_user, w_cand, None, index)
plain = torch.cat([x_user[index.long()], x_cand], 1) @ torch.cat([w_user, w_cand], 1).T
torch.testing.assert_close(out, plain)
print(ikbo.__file__)
print(ops_library_path())
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "CMAKE_ARGS": "-DIKBO_CUDA=OFF"},
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        # Of its own: what CMake keeps of this one must not decide what `make wheel` builds.
        "--config-settings=build-dir=build/wheel-test",
        "--wheel-dir",
        folder,
        REPO,
        cwd=folder,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and PyTorch by reference to this one's."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    (Path(site) / "torch-elsewhere.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_tag_says_any_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")


def test_wheel_holds_the_library_and_no_torch(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if ".so" in name]
    assert libraries == ["ikbo/lib/libikbo_ops.so"]
    transform = "ikbo/transform"
    for data in ("ikbo/py.typed", f"{transform}/spec.schema.json", f"{transform}/report/page.html"):
        assert data in names
    outside = [name for name in names if not name.startswith(("ikbo/", "ikbo-"))]
    assert outside == []


def test_library_finds_torch_beside_it(wheel: Path, tmp_path: Path) -> None:
    library = zipfile.ZipFile(wheel).extract("ikbo/lib/libikbo_ops.so", tmp_path)
    dynamic = run("readelf", "-d", library, cwd=tmp_path)
    (path,) = [line for line in dynamic.splitlines() if "RUNPATH" in line or "RPATH" in line]
    assert path.endswith("[$ORIGIN/../../torch/lib]")


def test_operator_runs_in_another_environment(environment: Path) -> None:
    module, library = run(environment / "bin" / "python", "-c", USE, cwd=environment).split()
    assert Path(module).is_relative_to(environment)
    assert Path(library).is_relative_to(environment)


def test_command_line_is_installed(environment: Path) -> None:
    text = run(environment / "bin" / "ikbo", "--help", cwd=environment)
    assert all(command in text for command in ("transform", "explain", "package", "report"))
