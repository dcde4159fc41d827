# SPDX-License-Identifier: Apache-2.0
"""Two minutes of the soak that `make nightly` runs for twenty: bench/soak.py."""

from __future__ import annotations

import pytest

from bench import soak
from tests.server.serving import Served, server_path


@pytest.mark.timeout(400)
def test_two_minutes_under_load_with_reloads(ranker: Served) -> None:
    flags = ["--seconds", "120", "--reload-every", "10", "--server", str(server_path())]
    # On a machine that others use, requests that wait are memory, too: the 2 % are nightly's.
    flags += ["--memory-change", "0.5"]
    assert soak.main([str(ranker.package), *flags]) == 0


def test_the_memory_of_a_leak_is_seen() -> None:
    assert soak.memory_change([100] * 30 + [100, 100, 300, 100] * 5) == pytest.approx(0.0)
    assert soak.memory_change(list(range(100, 200))) > soak.MAX_MEMORY_CHANGE


def test_a_wrong_answer_is_seen(ranker: Served) -> None:
    case = soak.read_cases(ranker.package)[-1]
    bodies = [values.tobytes() for _, values in case.outputs]
    described = ",".join(
        f'{{"name":"{name}","parameters":{{"binary_data_size":{len(body)}}}}}'
        for (name, _), body in zip(case.outputs, bodies, strict=True)
    )
    head = f'{{"outputs":[{described}]}}'.encode()
    fields = {"inference-header-content-length": str(len(head))}
    assert case.matches(fields, head + b"".join(bodies))
    changed = (case.outputs[0][1] + 0.1).tobytes()
    assert not case.matches(fields, head + changed + b"".join(bodies[1:]))
