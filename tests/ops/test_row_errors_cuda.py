# SPDX-License-Identifier: Apache-2.0
"""Rounding errors of lce and linear on a GPU, row by row, against those of cuBLAS.

cuBLAS takes the same numbers in one product: the users' rows replicated, the bias as one more k,
sums in fp32, one rounding. An output row's error is the root mean square of its elements' errors,
the reference in fp64. No row of ours may have more than 1.05 times that of cuBLAS, or of the fp64
row rounded once where that is more.

The bound can be this tight because a row's errors are those of its last rounding: hundreds of
them, alike in size, from fp32 sums that both results have nearly in common. A row's largest error
would hinge on where one sum falls between two numbers. A user part rounded on its way adds as much
error again, which the last test shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ikbo
from tests.ops.test_library import traced_kernels

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ALLOWED = 1.05


@dataclass(frozen=True)
class Shape:
    name: str
    U: int
    B: int
    M: int
    K_user: int = 1178
    K_cand: int = 866
    N: int = 1
    k_inner: bool = False  # the other of the layouts: K innermost in lce, outermost in linear

    def randn(self, batch: int, k: int, device: str, dtype: torch.dtype) -> Tensor:
        shape = (batch, k, self.N) if self.N > 1 else (batch, k)
        dims = (-2, -1) if self.N > 1 else (0, 1)
        x = torch.randn(shape, device=device, dtype=dtype)
        return x.transpose(*dims).contiguous().transpose(*dims) if self.k_inner else x


LCE = [
    Shape("two stages", 15, 257, 433, N=256),
    Shape("one candidate a user", 210, 210, 96, N=256),
    Shape("few tiles", 1, 3, 433, N=256),
    Shape("narrow, many users a CTA", 140, 300, 70, 400, 700, N=128),
    Shape("any architecture", 15, 100, 433, N=250),
    Shape("any architecture, K innermost", 5, 60, 130, N=128, k_inner=True),
]
LINEAR = [
    Shape("sums split over clusters", 15, 70, 433),
    Shape("many tiles", 300, 20_000, 433),
    Shape("one candidate a user", 4096, 4096, 256, 512, 768),
    Shape("any architecture", 5, 300, 200, k_inner=True),
]


@pytest.fixture(autouse=True)
def sums_in_fp32() -> Iterator[None]:
    """What cuBLAS adds up is not rounded to 16 bits where it splits a sum."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")]
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


def row_errors(out: Tensor, reference: Tensor) -> Tensor:
    return (out.double() - reference).square().mean(-1).sqrt()


def worst_ratio(out: Tensor, other: Tensor, reference: Tensor) -> float:
    """The largest of a row's error to what it may be compared with; NaN counts as infinite."""
    rounded_once = row_errors(reference.to(out.dtype), reference)
    ratio = row_errors(out, reference) / row_errors(other, reference).maximum(rounded_once)
    return ratio.nan_to_num(nan=torch.inf).max().item()


def check(op: Callable[..., Tensor], shape: Shape, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_user = shape.randn(shape.U, shape.K_user, "cuda", dtype)
    x_cand = shape.randn(shape.B, shape.K_cand, "cuda", dtype)
    w_user = torch.randn(shape.M, shape.K_user, device="cuda", dtype=dtype)
    w_cand = torch.randn(shape.M, shape.K_cand, device="cuda", dtype=dtype)
    bias = torch.randn(shape.M, device="cuda", dtype=dtype)
    index = (torch.arange(shape.B, device="cuda") * shape.U // shape.B).int()
    index = index[torch.randperm(shape.B, device="cuda")]
    with traced_kernels() as launches:
        out = op(x_user, x_cand, w_user, w_cand, bias, index)
    ones = torch.ones_like(x_cand[:, :1])
    x = torch.cat((x_user.index_select(0, index), x_cand, ones), 1)
    w = torch.cat((w_user, w_cand, bias[:, None]), 1)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return w @ x if x.dim() == 3 else x @ w.T

    cublas, reference = product(x, w), product(x.double(), w.double())
    assert out.shape == cublas.shape
    assert len(launches) == 1, launches
    assert worst_ratio(out, cublas, reference) <= ALLOWED, launches


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LCE, ids=lambda shape: shape.name)
def test_lce(shape: Shape, dtype: torch.dtype) -> None:
    check(ikbo.lce, shape, dtype)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LINEAR, ids=lambda shape: shape.name)
def test_linear(shape: Shape, dtype: torch.dtype) -> None:
    check(ikbo.linear, shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_rounded_user_part_is_too_much(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x_user, x_cand, w_user, w_cand = (
        randn(90, 300),
        randn(90, 200),
        randn(256, 300),
        randn(256, 200),
    )
    user, cand = x_user.float() @ w_user.float().T, x_cand.float() @ w_cand.float().T
    reference = x_user.double() @ w_user.double().T + x_cand.double() @ w_cand.double().T
    one_product = torch.cat((x_user, x_cand), 1).float() @ torch.cat((w_user, w_cand), 1).float().T
    other = one_product.to(dtype)
    assert worst_ratio((user + cand).to(dtype), other, reference) <= ALLOWED
    assert worst_ratio((user.to(dtype) + cand).to(dtype), other, reference) > ALLOWED
    assert worst_ratio(other * torch.nan, other, reference) == torch.inf
    # One row of many.
    ours = (user + cand).to(dtype)
    ours[17] = (user.to(dtype) + cand).to(dtype)[17]
    assert worst_ratio(ours, other, reference) > ALLOWED
