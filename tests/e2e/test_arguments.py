# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of `ikbo.package` are refused with a helpful text; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo import _inductor, _replay
from ikbo._programs import export
from ikbo._served import from_module
from ikbo.package import check_name
from ikbo.transform import TransformedModule


class Pair(nn.Module):
    def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> Tensor:
        return ikbo.expand(x_user, cand_to_user) * x_cand


def arguments(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "module": Pair().eval(),
        "path": "model.pt2",
        "example_inputs": (
            torch.randn(4, 3),
            torch.randn(9, 3),
            torch.zeros(9, dtype=torch.int32),
        ),
        "roles": {"x_user": "user", "x_cand": "candidate", "cand_to_user": "index"},
        "max_users": 8,
        "max_candidates": 64,
    }
    return good | changes


def inputs(**changes: Tensor) -> tuple[Tensor, ...]:
    names = ("x_user", "x_cand", "cand_to_user")
    good = dict(zip(names, arguments()["example_inputs"], strict=True))
    return tuple((good | changes).values())


class TwoSizes(Pair):
    def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> Tensor:
        return super().forward(x_user, x_cand, cand_to_user).repeat(2, 1)


class ReturnsNone(Pair):
    def forward(  # type: ignore[override]
        self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor
    ) -> tuple[Tensor, None]:
        return super().forward(x_user, x_cand, cand_to_user), None


class NeedsElevenCandidates(Pair):
    def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> Tensor:
        return super().forward(x_user, x_cand, cand_to_user) + torch.zeros(11, 1)


class ForeignOperator(Pair):
    def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> Tensor:
        return foreign(super().forward(x_user, x_cand, cand_to_user))


@torch.library.custom_op("ikbo_test::foreign", mutates_args=())
def foreign(x: Tensor) -> Tensor:
    return x.clone()


@foreign.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "path suffix": ({"path": "model.so"}, ValueError, r"path must end with \.pt2; got 'model\.so'"),
    "path folder": ({"path": "absent/model.pt2"}, ValueError, "existing folder; .*absent"),
    "name": ({"name": "a/b"}, ValueError, "name must be letters.* got 'a/b'"),
    "version": ({"version": 3}, ValueError, "version must be letters.* got 3"),
    "module": ({"module": print}, TypeError, "must be an nn.Module; got builtin"),
    "training": ({"module": Pair().train()}, ValueError, r"eval mode; call module\.eval\(\)"),
    "no inputs": ({"example_inputs": None}, TypeError, "tuple of positional or a dict"),
    "arity": ({"example_inputs": inputs()[:2]}, TypeError, "must fit module.forward: missing"),
    "path": ({"path": 3}, TypeError, "path must be a str or a path; got int"),
    "tolerance": ({"tolerance": -1.0}, ValueError, "tolerance must be a number >= 0; got -1.0"),
    "tolerance type": ({"tolerance": "x"}, ValueError, "tolerance must be a number >= 0; got 'x'"),
    "roles type": ({"roles": ["user"]}, TypeError, "roles must be a dict .*; got list"),
    "no tensor": (
        {"example_inputs": (torch.randn(4, 3).numpy(), *inputs()[1:])},
        TypeError,
        "input x_user must be a torch.Tensor; got ndarray",
    ),
    "no roles": ({"roles": None}, ValueError, "missing .'x_user', 'x_cand', 'cand_to_user'."),
    "unknown role name": (
        {"roles": arguments()["roles"] | {"ghost": "user"}},
        ValueError,
        "unknown .'ghost'.",
    ),
    "role": (
        {"roles": arguments()["roles"] | {"x_user": "item"}},
        ValueError,
        "input x_user must be one of user, candidate, index; got 'item'",
    ),
    "no index": (
        {"roles": arguments()["roles"] | {"cand_to_user": "candidate"}},
        ValueError,
        "one input with role index.* got 1 user inputs and 0 indices",
    ),
    "index dtype": (
        {"example_inputs": inputs(cand_to_user=torch.zeros(9, dtype=torch.int64))},
        ValueError,
        "index cand_to_user must be int32 of shape .B.; got torch.int64",
    ),
    "rows": (
        {"example_inputs": inputs(x_cand=torch.randn(8, 3))},
        ValueError,
        "equally many rows; input cand_to_user .index. has 9, another 8",
    ),
    "scalar": ({"example_inputs": inputs(x_user=torch.tensor(1.0))}, ValueError, "x_user must "
    "have a batch"),
    "dtype": (
        {"example_inputs": inputs(x_user=torch.randn(4, 3, dtype=torch.complex64))},
        TypeError,
        "dtype of input x_user must be one of bool.*; got torch.complex64",
    ),
    "max_users": ({"max_users": 0}, ValueError, "max_users must be an int in .* got 0"),
    "max_candidates": ({"max_candidates": None}, ValueError, "max_candidates .* got None"),
    "bool range": ({"max_candidates": True}, ValueError, "max_candidates .* got True"),
    "users without user inputs": (
        {"roles": dict.fromkeys(arguments()["roles"], "candidate"), "example_inputs":
        inputs(x_user=torch.randn(9, 3))},
        ValueError,
        "max_users must be 0 or left out",
    ),
    "output batch": ({"module": TwoSizes().eval()}, ValueError, "output output must have shape .U"),
    "output type": (
        {"module": ReturnsNone().eval()},
        RuntimeError,
        "outputs must be tensors; got NoneType",
    ),
    "fixed batch": ({"module": NeedsElevenCandidates().eval()}, RuntimeError, "torch.export of "
    "Needs"),
    "foreign operator": ({"module": ForeignOperator().eval()}, RuntimeError, "calls "
    r"ikbo_test::foreign \(test_arguments.py:\d+.*: return foreign\("),
}  # fmt: skip


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "é", "a\n"])
def test_names_that_no_path_can_hold(name: str) -> None:
    with pytest.raises(ValueError, match=r"but not '\.' or '\.\.'; got"):
        check_name("name", name)


@pytest.mark.parametrize("name", ["_", "-x", ".x", "...", "a.b-c_3", "3"])
def test_names_that_the_runtime_takes(name: str) -> None:
    check_name("name", name)


@pytest.mark.parametrize("case", BAD)
def test_bad_argument(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, error, text = BAD[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        ikbo.package(**arguments(**changes))
    assert not list(tmp_path.iterdir())


def test_transformed_module_knows_its_inputs(
    transformed: TransformedModule, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="roles must be left out"):
        ikbo.package(transformed, tmp_path / "model.pt2", roles={"user_id": "user"})
    with pytest.raises(ValueError, match=r"max_users must be at most 16.* got 17"):
        ikbo.package(transformed, tmp_path / "model.pt2", max_users=17)


@pytest.mark.parametrize(("max_users", "max_candidates"), [(1, 1), (2, 2), (1, 500), (64, 2)])
def test_small_ranges_keep_both_batches_free(max_users: int, max_candidates: int) -> None:
    limits = {"max_users": max_users, "max_candidates": max_candidates}
    names = ("example_inputs", "roles")
    served = from_module(Pair().eval(), *(arguments()[name] for name in names), *limits.values())
    nodes = [n for n in export(served, served.module).graph.nodes if n.op == "placeholder"]
    users, *candidates = (node.meta["val"].shape[0] for node in nodes)
    assert all(isinstance(size, torch.SymInt) for size in (users, *candidates))
    assert str(users) not in {str(size) for size in candidates}


def fail_to_compile(*_: Any) -> None:
    raise RuntimeError("the compiler failed")


def compile_halfway(_programs: Any, file: Any) -> None:
    file.write(b"half a package")


@pytest.mark.parametrize("compiler", [fail_to_compile, compile_halfway])
def test_failed_compile_leaves_the_old_package(
    compiler: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_inductor, "compile_to", compiler)
    target = tmp_path / "model.pt2"
    target.write_bytes(b"the old package")
    with pytest.raises(RuntimeError):
        ikbo.package(**arguments(path=target))
    assert target.read_bytes() == b"the old package"
    assert list(tmp_path.iterdir()) == [target]


def test_miscompiled_package_is_refused(
    hand_written_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose code computes something else than the module never appears."""

    class Third(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 3

    def compile_wrongly(_programs: Any, file: Any) -> None:
        file.write(hand_written_package.read_bytes())

    monkeypatch.setattr(_inductor, "compile_to", compile_wrongly)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda _: lambda x: [x / 3 + 1e-3])
    with pytest.raises(
        RuntimeError, match=r"output 0 .* within atol .* largest difference is 0\.001"
    ):
        ikbo.package(
            Third().eval(),
            tmp_path / "model.pt2",
            example_inputs=(torch.rand(5),),
            roles={"x": "candidate"},
            max_candidates=9,
        )
    assert not list(tmp_path.iterdir())


def test_tolerance_follows_the_coarsest_dtype() -> None:
    tolerances = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        module = nn.Linear(3, 1).to(dtype).eval()
        served = from_module(
            module, (torch.randn(4, 3, dtype=dtype),), {"input": "candidate"}, None, 9
        )
        tolerances[dtype] = _replay.tolerance_of(served, [])
    assert tolerances[torch.float64] < tolerances[torch.float32] < tolerances[torch.bfloat16]
    assert tolerances[torch.bfloat16] < 0.1
