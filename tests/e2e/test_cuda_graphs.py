# SPDX-License-Identifier: Apache-2.0
"""Runs as CUDA graphs, in this process and in `ikbo-server`, against runs without."""

from __future__ import annotations

import gc
import re
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ikbo
import ikbo.runtime
from examples.movielens.serving import Client, encode
from tests.e2e.models import HISTORY, WIDTH, split_ranker
from tests.server.serving import running

MAX_USERS, MAX_CANDIDATES = 16, 2048
GRAPHS = 256  # enough for steps of a quarter
RUNS = 200
Arrays = dict[str, np.ndarray]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; there is none")


def write(path: Path, **options: bool) -> Path:
    recipe = split_ranker("cuda")
    ikbo.package(
        recipe.module, path, example_inputs=recipe.inputs, roles=recipe.roles,
        max_users=MAX_USERS, max_candidates=MAX_CANDIDATES, name="ranker", tolerance=0.01,
        **options,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("graphs") / "cuda.pt2")


@pytest.fixture(scope="module")
def plain(package: Path) -> ikbo.runtime.Model:
    return ikbo.runtime.Model(package)


@pytest.fixture(scope="module")
def recorded(package: Path) -> ikbo.runtime.Model:
    return ikbo.runtime.Model(package, cuda_graphs=GRAPHS)


def make_inputs(num_users: int, num_candidates: int, rng: np.random.Generator) -> Arrays:
    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(np.float16)

    return {
        "user": rows(num_users, WIDTH),
        "events": rows(num_users, HISTORY, WIDTH),
        "user_fields": rows(num_users, 6, 16),
        "item": rows(num_candidates, WIDTH),
        "item_fields": rows(num_candidates, 5, 16),
        "cand_to_user": rng.integers(0, num_users, num_candidates).astype(np.int32),
    }


def padded(inputs: Arrays, num_users: int, num_candidates: int) -> Arrays:
    """As docs/decisions/014-cuda-graphs.md has it."""

    def pad(name: str, x: np.ndarray) -> np.ndarray:
        rows = num_users if name.startswith(("user", "events")) else num_candidates
        value = num_users - 1 if name == "cand_to_user" else 0
        return np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), value, x.dtype)])

    return {name: pad(name, x) for name, x in inputs.items()}


def step_of(count: int, least: int, quarters: int) -> int:
    """The least step of users or candidates that holds so many."""
    octave = least
    while octave * 2 < count:
        octave *= 2
    steps = [octave + octave * part // quarters for part in range(quarters + 1)]
    return next(step for step in steps if step >= count)


def random_size(rng: np.random.Generator) -> tuple[int, int]:
    """Small ones as often as large ones."""
    most = int(2 ** rng.uniform(0, np.log2(MAX_CANDIDATES)))
    return int(rng.integers(1, MAX_USERS + 1)), max(1, min(most, MAX_CANDIDATES))


def assert_close(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """Within the rounding of fp16 results whose sums were taken in another order."""
    for name, x in got.items():
        np.testing.assert_allclose(
            x.astype(np.float32), want[name].astype(np.float32), rtol=2e-3, atol=2e-3, err_msg=name
        )


@needs_gpu
def test_padding_gives_the_bits_of_the_padded_run_on_the_gpu(
    plain: ikbo.runtime.Model, recorded: ikbo.runtime.Model
) -> None:
    """The rows of a run are those of the larger one, kernel by kernel, whatever is in the rest."""
    rng = np.random.default_rng(1)
    equal = 0
    for _ in range(RUNS):
        users, candidates = random_size(rng)
        inputs = make_inputs(users, candidates, rng)
        got = recorded(**inputs)
        alone = plain(**inputs)
        assert_close(got, alone)
        size = step_of(users, 1, 1), step_of(candidates, 16, 4)
        larger = plain(**padded(inputs, *size))
        for name, x in got.items():
            # A size without a graph runs as it is.
            same = [np.array_equal(x, other[name][: len(x)]) for other in (larger, alone)]
            assert any(same), f"{name} of {users} users and {candidates} candidates"
        equal += all(np.array_equal(x, larger[name][: len(x)]) for name, x in got.items())
    assert equal > RUNS // 2


@needs_gpu
def test_the_rest_of_a_padded_run_changes_no_bit_on_the_gpu(recorded: ikbo.runtime.Model) -> None:
    rng = np.random.default_rng(2)
    inputs = make_inputs(3, 50, rng)
    want = recorded(**inputs)
    for _ in range(10):
        recorded(**make_inputs(4, 56, rng))  # the same graph, full
        got = recorded(**inputs)
        for name, x in want.items():
            np.testing.assert_array_equal(got[name], x)


@needs_gpu
def test_allocates_nothing_once_warm_on_the_gpu(recorded: ikbo.runtime.Model) -> None:
    """`cudaMalloc` and `cudaHostAlloc` by the counts of PyTorch's allocators; this process's
    resident memory.
    """
    rng = np.random.default_rng(3)
    sizes = [random_size(rng) for _ in range(RUNS)]
    inputs = [make_inputs(*size, rng) for size in sizes]
    recorded(**make_inputs(MAX_USERS, MAX_CANDIDATES, rng))  # as the server's warm-up does
    recorded(**inputs[0])

    def counts() -> tuple[int, int]:
        return (
            torch.cuda.memory_stats()["num_device_alloc"],
            torch.cuda.host_memory_stats()["num_host_alloc"],
        )

    before, resident = counts(), resident_kib()
    for _ in range(5):
        for given in inputs:
            recorded(**given)
    assert counts() == before
    assert resident_kib() - resident < 4096


def resident_kib() -> int:
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[0])


@needs_gpu
def test_two_sessions_at_once_on_the_gpu(package: Path, plain: ikbo.runtime.Model) -> None:
    model = ikbo.runtime.Model(package, num_sessions=2, cuda_graphs=GRAPHS)
    rng = np.random.default_rng(4)
    cases = [make_inputs(*random_size(rng), rng) for _ in range(40)]
    want = [plain(**inputs) for inputs in cases]
    problems: list[BaseException] = []

    def work(order: range) -> None:
        try:
            for _ in range(5):
                for i in order:
                    assert_close(model(**cases[i]), want[i])
        except BaseException as problem:
            problems.append(problem)

    threads = [
        threading.Thread(target=work, args=(order,))
        for order in (range(40), range(39, -1, -1), range(0, 40, 3))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]


@needs_gpu
def test_streams_of_an_unloaded_model_serve_the_next_on_the_gpu(
    package: Path, plain: ikbo.runtime.Model
) -> None:
    rng = np.random.default_rng(10)
    cases = [make_inputs(*random_size(rng), rng) for _ in range(20)]
    for _ in range(3):
        model = ikbo.runtime.Model(package, num_sessions=2, cuda_graphs=GRAPHS)
        for inputs in cases:
            assert_close(model(**inputs), plain(**inputs))
        del model
        gc.collect()


@needs_gpu
def test_replays_after_an_error_on_the_gpu(recorded: ikbo.runtime.Model) -> None:
    rng = np.random.default_rng(5)
    inputs = make_inputs(2, 40, rng)
    want = recorded(**inputs)
    with pytest.raises(RuntimeError, match="cand_to_user"):
        recorded(**inputs | {"cand_to_user": inputs["cand_to_user"] + 2})
    for name, x in recorded(**inputs).items():
        np.testing.assert_array_equal(x, want[name])


@needs_gpu
def test_stages_have_graphs_of_their_own_on_the_gpu(
    plain: ikbo.runtime.Model, tmp_path: Path
) -> None:
    staged = write(tmp_path / "staged.pt2", user_stage=True)
    model = ikbo.runtime.Model(staged, cuda_graphs=GRAPHS)
    rng = np.random.default_rng(9)
    for _ in range(50):
        inputs = make_inputs(*random_size(rng), rng)
        assert_close(model(**inputs), plain(**inputs))


class Synchronising(nn.Module):
    """Eigenvalues, whose operator asks the GPU whether it succeeded."""

    def forward(self, user: Tensor, item: Tensor, cand_to_user: Tensor) -> dict[str, Tensor]:
        values = torch.linalg.eigvalsh(user @ user.transpose(1, 2))
        return {"score": (ikbo.expand(values, cand_to_user) * item).sum(1)}


def package_synchronising(path: Path) -> Path:
    example = {
        "user": torch.randn(4, 5, 5, device="cuda"),
        "item": torch.randn(24, 5, device="cuda"),
        "cand_to_user": torch.zeros(24, dtype=torch.int32, device="cuda"),
    }
    roles = {"user": "user", "item": "candidate", "cand_to_user": "index"}
    ikbo.package(
        Synchronising().eval(), path, example_inputs=example, roles=roles,
        max_users=4, max_candidates=256, name="ranker",
    )  # fmt: skip
    return path


@needs_gpu
def test_what_cannot_be_recorded_runs_without_on_the_gpu(tmp_path: Path) -> None:
    package = package_synchronising(tmp_path / "eigenvalues.pt2")
    rng = np.random.default_rng(6)
    inputs = {
        "user": rng.standard_normal((3, 5, 5), dtype=np.float32),
        "item": rng.standard_normal((30, 5), dtype=np.float32),
        "cand_to_user": rng.integers(0, 3, 30).astype(np.int32),
    }
    want = Synchronising()(*map(torch.from_numpy, inputs.values()))["score"].numpy()
    with running([package], "--workers=2") as server:
        for _ in range(5):
            got = Client(server.port).infer(*encode(inputs))["score"]
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        assert read_metric(server.port, 'ikbo_gpu_runs_total{launch="graph"}') == 0
        lines = [line for line in server.log if "event=cuda_graphs" in line]
    assert len(lines) == 1, lines
    assert "event=cuda_graphs_failed" in lines[0]


def read_metric(port: int, name: str) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"/metrics has no {name}"
    return float(found[1])


@needs_gpu
def test_the_server_replays_and_counts_on_the_gpu(package: Path, plain: ikbo.runtime.Model) -> None:
    rng = np.random.default_rng(7)
    cases = [make_inputs(1, count, rng) for count in (1, 16, 33, 64, 100)]
    with running([package], "--workers=2", "--max-batch-users=4") as server:
        client = Client(server.port)  # once it listens
        made = [line for line in server.log if "event=cuda_graphs " in line]
        assert len(made) == 2, server.log
        assert all(re.search(r" graphs=[1-9]\d* ", line) for line in made), made

        def ask() -> None:
            for inputs in cases:
                assert_close(client.infer(*encode(inputs)), plain(**inputs))

        ask()
        names = [f'ikbo_gpu_allocations_total{{memory="{kind}"}}' for kind in ("device", "pinned")]
        names.append('ikbo_gpu_runs_total{launch="graph"}')
        before = [read_metric(server.port, name) for name in names]
        ask()
        after = [read_metric(server.port, name) for name in names]
    assert after[:2] == before[:2]
    assert after[2] - before[2] == len(cases)


@needs_gpu
@pytest.mark.parametrize("flag", ["--cuda-graphs=0", "--cuda-graph-memory=1"])
def test_the_server_runs_without_on_the_gpu(
    package: Path, plain: ikbo.runtime.Model, flag: str
) -> None:
    inputs = make_inputs(2, 40, np.random.default_rng(8))
    with running([package], flag) as server:
        assert_close(Client(server.port).infer(*encode(inputs)), plain(**inputs))
        assert read_metric(server.port, 'ikbo_gpu_runs_total{launch="graph"}') == 0
        assert read_metric(server.port, 'ikbo_gpu_runs_total{launch="kernels"}') > 0
