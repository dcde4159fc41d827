# SPDX-License-Identifier: Apache-2.0
"""ikbo::expand on a GPU: exact for every dtype, rank and layout; its kernel; its gradient."""

import pytest
import torch

import ikbo
from ikbo.testing.inputs import in_layout
from tests.ops.test_expand import ANY_DTYPE
from tests.ops.test_library import traced_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("layout", ["contiguous", "padded", "transposed"])
@pytest.mark.parametrize(
    "sizes", [(4,), (4, 1), (4, 37), (4, 0), (4, 3, 64), (4, 2, 3, 5)], ids=str
)
@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_exact(dtype: torch.dtype, sizes: tuple[int, ...], layout: str) -> None:
    if sizes[-1] == 0:
        layout = "contiguous"
    x_user = in_layout((torch.rand(sizes, device="cuda") * 3).to(dtype), layout)
    index = torch.tensor([3, 0, 0, 2, 3] * 70, dtype=torch.int32, device="cuda")
    out = ikbo.expand(x_user, index)
    assert out.is_contiguous()
    assert torch.equal(out, x_user[index.long()])


def test_rows_and_index_with_strides() -> None:
    x_user = torch.arange(60, device="cuda").view(5, 3, 4)[::2, :, 1:3]
    index = torch.tensor([2, 9, 0, 9, 1, 9], dtype=torch.int32, device="cuda")[::2]
    assert torch.equal(ikbo.expand(x_user, index), x_user[index.long()])
    one_row = torch.rand(1, 8, device="cuda").expand(3, 8)
    assert torch.equal(ikbo.expand(one_row, index), one_row[index.long()])


def test_no_candidates() -> None:
    index = torch.zeros(0, dtype=torch.int32, device="cuda")
    assert ikbo.expand(torch.rand(3, 8, device="cuda"), index).shape == (0, 8)


def test_kernel_is_ours() -> None:
    index = torch.zeros(5, dtype=torch.int32, device="cuda")
    with traced_kernels() as launches:
        ikbo.expand(torch.rand(3, 8, device="cuda"), index)
        ikbo.expand(torch.rand(3, 7, device="cuda"), index)
    assert launches == [("expand", "expand_gather<bytes=16>"), ("expand", "expand_gather<bytes=4>")]


def test_gradient_is_the_sum_over_candidates() -> None:
    x_user = torch.rand(3, 8, device="cuda", requires_grad=True)
    index = torch.tensor([2, 0, 2], dtype=torch.int32, device="cuda")
    grad = torch.rand(3, 8, device="cuda")
    ikbo.expand(x_user, index).backward(grad)
    assert x_user.grad is not None
    expected = torch.stack([grad[1], torch.zeros(8, device="cuda"), grad[0] + grad[2]])
    torch.testing.assert_close(x_user.grad, expected)


def test_replays_in_a_cuda_graph() -> None:
    x_user = torch.rand(3, 64, device="cuda")
    index = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device="cuda")
    ikbo.expand(x_user, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ikbo.expand(x_user, index)
    x_user.copy_(torch.rand(3, 64, device="cuda"))
    index.copy_(torch.tensor([1, 1, 0, 2], dtype=torch.int32, device="cuda"))
    graph.replay()
    assert torch.equal(out, x_user[index.long()])
