# SPDX-License-Identifier: Apache-2.0
"""Each module against its plain counterpart on repeated rows: weights, results, gradients.

Everything runs in fp64, where the two ways of summing agree to a few units in the last place.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo import CandidateIndex, nn
from tests.nn.plain import PlainAttention, PlainCompression, PlainLinear

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
INDICES = {
    "sorted": CandidateIndex.from_counts([3, 1, 4]),
    "shuffled": CandidateIndex.from_cand_to_user([2, 0, 2, 1, 0, 2, 0]),
    "idle-user": CandidateIndex.from_counts([0, 5, 2]),
}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=INDICES, ids=str)
def index(request: pytest.FixtureRequest) -> CandidateIndex:
    return INDICES[request.param]


def assert_same(ours: Tensor, plain: Tensor, leaves: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Results and gradients are equal; `leaves` holds pairs (ours, plain) by name."""
    torch.testing.assert_close(ours, plain, **TOLERANCE)
    weights = torch.randn_like(plain)
    (ours * weights).sum().backward()
    (plain * weights).sum().backward()
    for name, (mine, theirs) in leaves.items():
        assert theirs.grad is not None and theirs.grad.abs().max() > 0, name
        torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE, msg=name)


def twin(*shape: int) -> tuple[Tensor, Tensor]:
    """The same random leaf twice."""
    x = torch.randn(shape)
    return x.requires_grad_(), x.detach().clone().requires_grad_()


def parameters(ours: torch.nn.Module, plain: torch.nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of parameters, after ours were loaded from the plain module's."""
    ours.load_state_dict(plain.state_dict())
    theirs = dict(plain.named_parameters())
    return {name: (parameter, theirs[name]) for name, parameter in ours.named_parameters()}


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu", "sigmoid"])
def test_linear(index: CandidateIndex, activation: str) -> None:
    ours = nn.Linear(5, 7, 6, activation=activation)
    plain = PlainLinear(5, 7, 6, activation)
    leaves = parameters(ours, plain)
    user, cand = twin(index.num_users, 5), twin(index.num_candidates, 7)
    rows = index.cand_to_user.long()
    assert_same(
        ours(user[0], cand[0], index),
        plain(user[1][rows], cand[1]),
        {**leaves, "x_user": user, "x_cand": cand},
    )


def test_linear_compression(index: CandidateIndex) -> None:
    ours, plain = nn.LinearCompression(5, 3, 4), PlainCompression(5, 3, 4)
    leaves = parameters(ours, plain)
    user, cand = twin(index.num_users, 5, 8), twin(index.num_candidates, 3, 8)
    rows = index.cand_to_user.long()
    assert_same(
        ours(user[0], cand[0], index),
        plain(user[1][rows], cand[1]),
        {**leaves, "e_user": user, "e_cand": cand},
    )


@pytest.mark.parametrize("kind", ["whole", "lengths", "mask"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_target_attention(index: CandidateIndex, kv_heads: int, kind: str) -> None:
    s = 6
    ours = nn.TargetAttention(8, 4, num_kv_heads=kv_heads, history_dim=5)
    plain = PlainAttention(8, 4, kv_heads, 5)
    leaves = parameters(ours, plain)
    cand, history = twin(index.num_candidates, 3, 8), twin(index.num_users, s, 5)
    lengths = torch.randint(1, s + 1, (index.num_users,), dtype=torch.int32)
    mask = torch.rand(index.num_users, s) < 0.5
    mask[:, -1] = True
    rows = index.cand_to_user.long()
    options: dict[str, Tensor] = {}
    plain_mask = None
    if kind == "lengths":
        options["user_lengths"] = lengths
        plain_mask = (torch.arange(s) < lengths[:, None])[rows]
    elif kind == "mask":
        options["user_mask"] = mask
        plain_mask = mask[rows]
    assert_same(
        ours(cand[0], history[0], index, **options),
        plain(cand[1], history[1][rows], plain_mask),
        # k_proj.bias shifts every score of a row alike: its gradient is zero
        {k: v for k, v in leaves.items() if k != "k_proj.bias"}
        | {"x_cand": cand, "history": history},
    )


def test_target_attention_of_packed_histories(index: CandidateIndex) -> None:
    s = 6
    module = nn.TargetAttention(8, 4, num_kv_heads=2, history_dim=5)
    lengths = torch.tensor([4, 0, 6][: index.num_users], dtype=torch.int32)
    counts = torch.arange(s) < lengths[:, None]
    cand, history = twin(index.num_candidates, 3, 8), twin(index.num_users, s, 5)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    assert_same(
        module(cand[0], history[0][counts], index, user_offsets=offsets),
        module(cand[1], history[1], index, user_lengths=lengths),
        {"x_cand": cand, "history": history},
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_self_target_attention(index: CandidateIndex, kv_heads: int, is_causal: bool) -> None:
    s = 6
    ours = nn.SelfTargetAttention(8, 4, num_kv_heads=kv_heads)
    plain = PlainAttention(8, 4, kv_heads, 8)
    leaves = parameters(ours, plain)
    cand, history = twin(index.num_candidates, 3, 8), twin(index.num_users, s, 8)
    lengths = torch.randint(1, s + 1, (index.num_users,), dtype=torch.int32)
    is_row = torch.arange(s) < lengths[:, None]
    seen = is_row[:, None, None, :].expand(-1, 1, s, s)
    rows = index.cand_to_user.long()
    out_user, out_cand = ours(cand[0], history[0], index, lengths, is_causal=is_causal)
    plain_user = plain(history[1], history[1], seen.tril() if is_causal else seen)
    plain_cand = plain(cand[1], history[1][rows], is_row[rows])
    assert_same(
        torch.cat([out_user[is_row], out_cand.flatten(0, 1)]),
        torch.cat([plain_user[is_row], plain_cand.flatten(0, 1)]),
        # k_proj.bias shifts every score of a row alike: its gradient is zero
        {k: v for k, v in leaves.items() if k != "k_proj.bias"}
        | {"x_cand": cand, "history": history},
    )
    assert (out_user[~is_row] == ours.out_proj.bias).all()


def test_self_target_attention_of_one_query_row_and_another_modules_weights() -> None:
    index = INDICES["shuffled"]
    plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    module = nn.SelfTargetAttention.from_multihead_attention(plain)
    x_cand, history = torch.randn(7, 8), torch.randn(3, 5, 8)
    out_user, out_cand = module(x_cand, history, index)
    torch.testing.assert_close(out_user, plain(history, history, history)[0], **TOLERANCE)
    repeated = history[index.cand_to_user.long()]
    expected, _ = plain(x_cand[:, None], repeated, repeated)
    torch.testing.assert_close(out_cand, expected[:, 0], **TOLERANCE)


def test_target_attention_takes_one_query_row_without_its_dimension() -> None:
    index = INDICES["shuffled"]
    module = nn.TargetAttention(8, 2)
    x_cand, history = torch.randn(7, 8), torch.randn(3, 5, 8)
    out = module(x_cand, history, index)
    assert out.shape == (7, 8)
    torch.testing.assert_close(out, module(x_cand[:, None], history, index)[:, 0])


def test_target_attention_of_an_empty_history_is_the_output_bias() -> None:
    module = nn.TargetAttention(8, 2)
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    index = CandidateIndex.from_counts([1, 1])
    out = module(torch.randn(2, 8), torch.randn(2, 5, 8), index, user_lengths=lengths)
    torch.testing.assert_close(out[0], module.out_proj.bias)
    assert (out[1] - module.out_proj.bias).abs().max() > 0


@pytest.mark.parametrize("history_dim", [8, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_a_multihead_attention(history_dim: int, bias: bool) -> None:
    plain = torch.nn.MultiheadAttention(
        8, 2, bias=bias, batch_first=True, kdim=history_dim, vdim=history_dim
    )
    if bias:
        torch.nn.init.normal_(plain.in_proj_bias)
    module = nn.TargetAttention.from_multihead_attention(plain)
    index = INDICES["shuffled"]
    x_cand, history = torch.randn(7, 8), torch.randn(3, 5, history_dim)
    repeated = history[index.cand_to_user.long()]
    expected, _ = plain(x_cand[:, None], repeated, repeated)
    torch.testing.assert_close(module(x_cand, history, index), expected[:, 0], **TOLERANCE)


def test_expand(index: CandidateIndex) -> None:
    user = twin(index.num_users, 4, 2)
    assert_same(nn.Expand()(user[0], index), user[1][index.cand_to_user.long()], {"x_user": user})


def test_modules_take_the_index_as_a_tensor_too() -> None:
    index = INDICES["shuffled"]
    module = nn.Linear(5, 7, 6)
    x_user, x_cand = torch.randn(3, 5), torch.randn(7, 7)
    torch.testing.assert_close(
        module(x_user, x_cand, index), module(x_user, x_cand, index.cand_to_user), rtol=0, atol=0
    )


def test_same_seed_gives_the_plain_modules_weights() -> None:
    torch.manual_seed(5)
    ours = nn.Linear(5, 7, 6)
    torch.manual_seed(5)
    plain = torch.nn.Linear(12, 6)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert torch.equal(ours.weight, plain.weight)
    assert torch.equal(ours.bias, plain.bias)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(0, 3, 4), "ikbo.nn.Linear: k_user must be an int of at least 1; got 0"),
        (lambda: nn.LinearCompression(3, -1, 4), "LinearCompression: k_cand .* got -1"),
        (lambda: nn.Linear(3, 3, 0), "out_features must be an int of at least 1; got 0"),
        (lambda: nn.Linear(4.5, 3, 4), "k_user must be an int of at least 1; got 4.5"),
        (lambda: nn.TargetAttention(8, "2"), "num_heads must be an int; got '2'"),
        (lambda: nn.TargetAttention(8, 3), "got embed_dim = 8, num_heads = 3"),
        (
            lambda: nn.SelfTargetAttention(8, 3),
            "ikbo.nn.SelfTargetAttention: embed_dim must .* got embed_dim = 8, num_heads = 3",
        ),
        (
            lambda: nn.SelfTargetAttention(8, 2, history_dim=5),
            "history_dim must be embed_dim = 8 or None; got 5",
        ),
        (lambda: nn.TargetAttention(8, 4, num_kv_heads=3), "num_heads = 4, num_kv_heads = 3"),
        (
            lambda: nn.TargetAttention.from_multihead_attention(
                torch.nn.MultiheadAttention(8, 2, dropout=0.5)
            ),
            "dropout = 0.5",
        ),
        (
            lambda: nn.TargetAttention.from_multihead_attention(
                torch.nn.MultiheadAttention(8, 2, kdim=3, vdim=4)
            ),
            "kdim = 3, vdim = 4",
        ),
        (
            lambda: nn.TargetAttention(8, 2)(torch.randn(8), torch.randn(1, 2, 8), torch.zeros(1)),
            r"x_cand must be \[B, embed_dim\].*got shape \(8,\)",
        ),
    ],
)
def test_bad_sizes_are_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("x_cand", "history", "text"),
    [
        (None, torch.ones(2, 3, 8), "x_cand must be a torch.Tensor; got NoneType"),
        (torch.ones(4, 8), [[1.0]], "history must be a torch.Tensor; got list"),
    ],
)
def test_attention_takes_tensors(x_cand: Any, history: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"ikbo.nn.TargetAttention: {text}"):
        nn.TargetAttention(8, 2)(x_cand, history, torch.zeros(4, dtype=torch.int32))
