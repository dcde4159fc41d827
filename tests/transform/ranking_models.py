# SPDX-License-Identifier: Apache-2.0
"""Blocks of public ranking models, as such code writes them, and near misses of each rule.

Each says how many FLOPs may be left per candidate, counted by hand from its sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.transform.mixed_models import OfTwo, embedding, floats, ids

T = 9  # history length
D = 4
LINEAR = ("aten.linear.default",)


@dataclass(frozen=True)
class Block:
    """A model in fp64, its inputs (one batch), and its user inputs.

    Attributes:
        flops: per candidate, of the transformed model.
        at_users: operators of which at least one call runs at U, whole or in part.
    """

    model: nn.Module
    inputs: Any
    users: tuple[str, ...]
    flops: int
    at_users: tuple[str, ...] = ()


# Per rule, its models; names say which pattern.
BLOCKS: dict[str, Callable[[], Block]] = {}
# Models that are left as they are: their FLOPs per candidate are those of the unmodified model.
NEAR_MISSES: dict[str, Callable[[], Block]] = {}


def _registered(table: dict[str, Callable[[], Block]], rule: str) -> Any:
    def register(make: Callable[[], Block]) -> Callable[[], Block]:
        def seeded() -> Block:
            torch.manual_seed(5)
            made = make()
            made.model.double().eval()
            return made

        table[f"{rule}-{make.__name__}"] = seeded
        return seeded

    return register


def block(rule: str) -> Any:
    return _registered(BLOCKS, rule)


def near_miss(rule: str) -> Any:
    return _registered(NEAR_MISSES, rule)


def history() -> Tensor:
    return floats(T, D)


class AttentionUnit(nn.Module):
    """Scores of a history by an MLP over `[q, k, q - k, q * k]`, masked, pooled by a product."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4 * D, hidden), nn.Linear(hidden, 1)

    def forward(self, length: Tensor, keys: Tensor, item: Tensor) -> Tensor:
        query = item.unsqueeze(1)
        queries = query.expand(-1, keys.size(1), -1)
        features = torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)
        scores = self.second(torch.sigmoid(self.first(features))).transpose(1, 2)
        places = torch.arange(keys.size(1), device=keys.device).repeat(keys.size(0), 1)
        mask = (places < length.view(-1, 1)).unsqueeze(1)
        scores = torch.where(mask, scores, torch.full_like(scores, -(2**32) + 1))
        return torch.matmul(torch.softmax(scores, dim=-1), keys).squeeze(1)


def lengths() -> Tensor:
    return torch.randint(1, T + 1, (40,))


def _unit_flops(hidden: int) -> int:
    """The query's columns, the products, the second layer, the pooling."""
    return 2 * D * hidden + 2 * T * D * hidden + 2 * T * hidden + 2 * T * D


@block("A12")
def attention_mlp_of_many_rows() -> Block:
    inputs = (lengths(), history(), floats(D))
    return Block(AttentionUnit(5), inputs, ("length", "keys"), _unit_flops(5))


@block("A12")
def attention_mlp_of_few_rows() -> Block:
    inputs = (lengths(), history(), floats(D))
    return Block(AttentionUnit(20), inputs, ("length", "keys"), _unit_flops(20), LINEAR)


class MergedUnit(nn.Module):
    """The same in another order, rows merged with the batch, a BatchNorm between, a weighted sum;
    profile features of the user beside each event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        self.layers = nn.Sequential(
            nn.Linear(5 * D, 6, bias=False), nn.BatchNorm1d(6), nn.PReLU(), nn.Linear(6, 1)
        )

    def forward(self, user: Tensor, seen: Tensor, item: Tensor) -> Tensor:
        keys, target = self.table(seen), self.table(item)
        target = target.unsqueeze(1).repeat(1, T, 1)
        profile = self.table(user).repeat_interleave(T, dim=1)
        features = torch.cat([target, keys, target - keys, target * keys, profile], dim=-1)
        weight = self.layers(features.view(-1, 5 * D)).view(-1, T)
        weight = weight * (seen != 0)
        return (weight.unsqueeze(-1) * keys).sum(dim=1)


@block("A12")
def attention_mlp_of_merged_rows() -> Block:
    flops = 2 * D * 6 + 2 * T * D * 6 + 2 * T * 6 + 2 * T * D
    inputs = (ids(1), ids(T), ids(1)[:, 0])
    return Block(MergedUnit(), inputs, ("user", "seen"), flops, ("aten.embedding.default",))


@near_miss("A12")
def attention_mlp_of_own_rows() -> Block:
    """Each event is compared with a candidate's event of its own."""

    def forward(user: Tensor, item: Tensor, first: nn.Module) -> Tensor:
        features = torch.cat([user * item, (user * item).tanh(), item.exp() - user.exp()], dim=-1)
        return first(features).sum(1)

    model = OfTwo(forward, nn.Linear(3 * D, 5))
    return Block(model, (history(), history()), ("user",), 2 * T * 3 * D * 5)


@block("A13")
def pooling_in_three_spellings() -> Block:
    def forward(user: Tensor, item: Tensor, first: nn.Module) -> Tensor:
        keys = first(user).tanh()
        dots = torch.softmax((keys * item.unsqueeze(1)).sum(-1), dim=-1)
        spelled = torch.einsum("bd,btd->bt", item, keys)
        products = torch.bmm(item.unsqueeze(1), keys.transpose(1, 2)).squeeze(1)
        return (
            torch.einsum("bt,btd->bd", dots, keys)
            + torch.sum(keys * spelled.unsqueeze(2), dim=1, keepdim=True).squeeze(1)
            + (products[:, None] @ keys)[:, 0]
        )

    model = OfTwo(forward, nn.Linear(D, D))
    at_users = ("aten.linear.default", "aten.tanh.default")
    return Block(model, (history(), floats(D)), ("user",), 6 * 2 * T * D, at_users)


@block("A13")
def attention_of_heads() -> Block:
    """Several heads, spelled out, one query per candidate."""

    def forward(
        user: Tensor, item: Tensor, to_q: nn.Module, to_k: nn.Module, to_v: nn.Module
    ) -> Tensor:
        q = to_q(item).view(-1, 1, 2, D // 2).transpose(1, 2)
        k, v = (to(user).view(-1, T, 2, D // 2).transpose(1, 2) for to in (to_k, to_v))
        weights = functional.softmax(torch.matmul(q, k.transpose(-2, -1)) / 2**0.5, dim=-1)
        return torch.matmul(weights, v).transpose(1, 2).reshape(-1, D)

    model = OfTwo(forward, *(nn.Linear(D, D) for _ in range(3)))
    flops = 2 * D * D + 2 * 2 * T * D
    return Block(model, (history(), floats(D)), ("user",), flops, LINEAR)


@near_miss("A13")
def pooling_of_own_rows() -> Block:
    def forward(user: Tensor, item: Tensor) -> Tensor:
        keys = torch.cat([user[:, :5] * 2, item[:, :4]], dim=1)
        return torch.bmm(torch.softmax(item.sum(-1), -1).unsqueeze(1), keys * item).squeeze(1)

    return Block(OfTwo(forward), (history(), history()), ("user",), 2 * T * D)


KU, KC = 6, 4


def two() -> tuple[Tensor, Tensor]:
    return floats(KU), floats(KC)


class Experts(nn.Module):
    """A mixture of experts, a gate and a tower for each task; a scalar gate of users."""

    def __init__(self) -> None:
        super().__init__()
        k = KU + KC
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(k, 5), nn.ReLU()) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(k, 3, bias=task == 0) for task in range(2))
        self.own = nn.Sequential(nn.Linear(KU, 5), nn.Sigmoid())
        self.towers = nn.ModuleList(nn.Linear(5, 1) for _ in range(2))

    def forward(self, user: Tensor, item: Tensor) -> list[Tensor]:
        x = torch.cat([user, item], dim=1)
        experts = torch.cat([expert(x).unsqueeze(1) for expert in self.experts], dim=1)
        outs = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = gate(x).softmax(dim=1).unsqueeze(1)
            pooled = torch.bmm(weights, experts).squeeze(1)
            outs.append(tower(pooled * self.own(user)).sigmoid())
        return outs


@block("A20")
def mixture_of_experts() -> Block:
    flops = 3 * 2 * KC * 5 + 2 * 2 * KC * 3 + 2 * 2 * 3 * 5 + 2 * 2 * 5
    at_users = ("aten.linear.default", "aten.sigmoid.default")
    return Block(Experts(), two(), ("user",), flops, at_users)


@near_miss("A20")
def experts_behind_a_softmax() -> Block:
    def forward(user: Tensor, item: Tensor, *experts: nn.Module) -> Tensor:
        x = torch.cat([user, item], dim=1).softmax(1)
        return torch.stack([torch.relu(expert(x)) for expert in experts], dim=1)

    model = OfTwo(forward, *(nn.Linear(KU + KC, 5) for _ in range(3)))
    return Block(model, two(), ("user",), 3 * 2 * (KU + KC) * 5)


class CrossOfVectors(nn.Module):
    """A cross network with one weight vector per layer, beside a deep net."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(layers, KU + KC, 1))
        self.bias = nn.Parameter(torch.randn(layers, KU + KC, 1))
        self.deep, self.out = nn.Linear(KU + KC, 3), nn.Linear(KU + KC + 3, 1, bias=False)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = torch.cat([user, item], dim=-1)
        x_0 = x.unsqueeze(2)
        x_l = x_0
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            xl_w = torch.tensordot(x_l, kernel, dims=([1], [0]))
            x_l = torch.matmul(x_0, xl_w) + bias + x_l
        deep = torch.relu(self.deep(x))
        return self.out(torch.cat([torch.squeeze(x_l, dim=2), deep], dim=-1))


@block("A9")
def cross_network_of_vectors() -> Block:
    flops = 3 * 2 * KC + 2 * KC * 3 + 2 * (KC + 3)
    at_users = ("aten.linear.default", "aten.mm.default")
    return Block(CrossOfVectors(3), two(), ("user",), flops, at_users[:1])


@block("A9")
def cross_network_of_linear_layers() -> Block:
    def forward(user: Tensor, item: Tensor, *layers: nn.Module) -> Tensor:
        x = x0 = torch.cat([user, item], dim=1)
        for layer in layers[:-1]:
            x = x0 * layer(x) + 0.5 + x
        return layers[-1](x).sigmoid()

    layers = [nn.Linear(KU + KC, 1, bias=False) for _ in range(3)] + [nn.Linear(KU + KC, 2)]
    flops = 3 * 2 * KC + 2 * KC * 2
    return Block(OfTwo(forward, *layers), two(), ("user",), flops, LINEAR)


@near_miss("A9")
def gate_for_each_feature() -> Block:
    def forward(user: Tensor, item: Tensor, layer: nn.Module) -> Tensor:
        x = torch.cat([user, item], dim=1)
        return layer(x * torch.sigmoid(x * item[:, :1].tanh()).flip(1))

    return Block(OfTwo(forward, nn.Linear(10, 2)), two(), ("user",), 2 * (KU + KC) * 2)


class CrossOfMatrices(nn.Module):
    """Two layers of a cross network with a matrix each, then a mixture of low-rank experts."""

    def __init__(self) -> None:
        super().__init__()
        k, r = KU + KC, 2
        self.kernels = nn.Parameter(torch.randn(2, k, k))
        self.bias = nn.Parameter(torch.randn(2, k, 1))
        self.u, self.v = (nn.Parameter(torch.randn(3, k, r)) for _ in range(2))
        self.c = nn.Parameter(torch.randn(3, r, r))
        self.gates = nn.ModuleList(nn.Linear(k, 1, bias=False) for _ in range(3))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x_0 = torch.cat([user, item], dim=-1).unsqueeze(2)
        x_l = x_0
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x_l = x_0 * (torch.matmul(kernel, x_l) + bias) + x_l
        outs, scores = [], []
        for u, v, c, gate in zip(self.u, self.v, self.c, self.gates, strict=True):
            scores.append(gate(x_0.squeeze(2)))
            low = torch.tanh(torch.matmul(c, torch.tanh(torch.matmul(v.t(), x_0))))
            outs.append((x_0 * torch.matmul(u, low)).squeeze(2))
        experts = torch.stack(outs, 2)
        mixed = torch.matmul(experts, torch.stack(scores, 1).softmax(1))
        return (mixed + x_l).squeeze(2)


@block("A10")
def cross_network_of_matrices() -> Block:
    """Layer 2 reads what the candidate is in; of layer 1 its columns are left."""
    k, r = KU + KC, 2
    matrices = 2 * k * KC + 2 * k * k
    experts = 3 * (2 * KC + 2 * r * KC + 2 * r * r + 2 * k * r) + 2 * k * 3
    return Block(CrossOfMatrices(), two(), ("user",), matrices + experts, LINEAR)


@near_miss("A10")
def second_layer_alone() -> Block:
    def forward(user: Tensor, item: Tensor, layer: nn.Module) -> Tensor:
        x_0 = torch.cat([user, item], dim=1)
        return layer(x_0 * x_0.flip(1))

    return Block(OfTwo(forward, nn.Linear(10, 10)), two(), ("user",), 2 * 10 * 10)


@block("A4")
def norms_before_layers() -> Block:
    def forward(user: Tensor, item: Tensor, *layers: nn.Module) -> Tensor:
        norm, first, second, rms, third, tokens, last = layers
        x = torch.cat([user, item], dim=-1)
        y = norm(x + 3.0)
        deep = torch.relu(first(y)) * torch.sigmoid(second(y))
        sequence = torch.stack([x, x.flip(-1)], dim=1).unsqueeze(3).expand(-1, -1, -1, 2)
        wide = torch.cat([user, item, user.tanh()], dim=-1)
        return deep + third(rms(wide)) + last(tokens(x)[:, :1] + sequence[:, 0, :, 0])

    k, m = KU + KC, 5
    parts = [
        nn.LayerNorm(k), nn.Linear(k, m), nn.Linear(k, m, bias=False), nn.RMSNorm(KU + k),
        nn.Linear(KU + k, m), nn.LayerNorm(k, elementwise_affine=False), nn.Linear(k, m),
    ]  # fmt: skip
    flops = 3 * 2 * KC * m + 2 * k * m
    return Block(OfTwo(forward, *parts), two(), ("user",), flops, ("aten.tanh.default",))


@block("A4")
def norm_spelled_out() -> Block:
    def forward(user: Tensor, item: Tensor, layer: nn.Module, weight: nn.Module) -> Tensor:
        x = torch.cat([user, item], dim=-1)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return layer(x * weight.weight[0])

    model = OfTwo(forward, nn.Linear(10, 3), nn.Linear(10, 1))
    return Block(model, two(), ("user",), 2 * KC * 3, ("aten.pow.Tensor_Scalar",))


@near_miss("A4")
def activation_behind_a_norm() -> Block:
    def forward(user: Tensor, item: Tensor, norm: nn.Module, layer: nn.Module) -> Tensor:
        return layer(norm(torch.cat([user, item], dim=-1)).tanh())

    model = OfTwo(forward, nn.LayerNorm(10), nn.Linear(10, 3))
    return Block(model, two(), ("user",), 2 * 10 * 3)


@block("A5")
def factorisation_machine() -> Block:
    """Falls out of sums of split sums: what is squared is added up per side."""

    def forward(user: Tensor, item: Tensor, table: nn.Module, first: nn.Module) -> Tensor:
        ids = torch.cat([user, item], dim=1)
        x = table(ids)
        square_of_sum = torch.pow(torch.sum(x, dim=1, keepdim=True), 2)
        sum_of_square = torch.sum(x * x, dim=1, keepdim=True)
        second = 0.5 * torch.sum(square_of_sum - sum_of_square, dim=2)
        pooled = torch.sum(x, dim=1) ** 2 - torch.sum(torch.square(x), dim=1)
        return first(ids).sum(1) + second + pooled.sum(1, keepdim=True)

    model = OfTwo(forward, embedding(), nn.Embedding(30, 1))
    at_users = ("aten.embedding.default", "aten.sum.dim_IntList", "aten.mul.Tensor")
    return Block(model, (ids(5), ids(2)), ("user",), 0, at_users)


@near_miss("A5")
def factorisation_machine_of_gated_fields() -> Block:
    def forward(user: Tensor, item: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
        x = table(torch.cat([user, item], dim=1))
        x = x * torch.softmax(x.mean(2), dim=1).unsqueeze(2)
        return out(x.sum(1) ** 2 - (x * x).sum(1))

    model = OfTwo(forward, embedding(), nn.Linear(D, 3))
    return Block(model, (ids(5), ids(2)), ("user",), 2 * D * 3)


class LastRow(nn.Module):
    """An encoder layer over history and target, of which the target's row is read."""

    def __init__(self, *, spelled: bool, heads: int = 2) -> None:
        super().__init__()
        self.spelled, self.heads = spelled, heads
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm, self.ffn = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = torch.cat([user, item.unsqueeze(1)], dim=1)
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for y in self.qkv(x).chunk(3, dim=-1)
        )
        if self.spelled:
            scores = torch.matmul(q, k.transpose(-2, -1)) / (d // self.heads) ** 0.5
            y = torch.matmul(torch.softmax(scores, dim=-1), v)
        else:
            y = functional.scaled_dot_product_attention(q, k, v)
        x = self.norm(x + self.out(y.transpose(1, 2).reshape(b, t, d)))
        return self.layer(x)

    def layer(self, x: Tensor) -> Tensor:
        return (x + torch.relu(self.ffn(x)))[:, -1]


def _last_row_flops(num_keys: int) -> int:
    """All layers and the attention of one row."""
    return 2 * D * 3 * D + 2 * 2 * num_keys * D + 2 * 2 * D * D


@block("A16")
def last_row_of_an_encoder() -> Block:
    """The candidate's own key, one, takes no product."""
    model, inputs = LastRow(spelled=False), (history(), floats(D))
    return Block(model, inputs, ("user",), _last_row_flops(T), LINEAR)


@block("A16")
def last_row_of_spelled_attention() -> Block:
    model, inputs = LastRow(spelled=True), (history(), floats(D))
    return Block(model, inputs, ("user",), _last_row_flops(T + 1), LINEAR)


@block("A16")
def last_row_by_einsum() -> Block:
    """The rows that are read lie on another axis of the result than of the product in it."""

    def forward(user: Tensor, item: Tensor, q: nn.Module, out: nn.Module) -> Tensor:
        x = torch.cat([user, item.unsqueeze(1)], dim=1)
        scores = torch.einsum("bnd,bmd->bmn", x, q(x))
        return out(scores[:, -2:].tanh().flatten(1))

    model = OfTwo(forward, nn.Linear(D, D), nn.Linear(2 * (T + 1), 1))
    flops = 2 * D * D + 2 * (T + 1) * (T + 1) * D + 2 * 2 * (T + 1)
    return Block(model, (history(), floats(D)), ("user",), flops, LINEAR)


class Encoded(nn.Module):
    """`nn.MultiheadAttention` over history and target; `read` says what is read of its rows."""

    def __init__(self, *, padded: bool, weights: bool, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.padded, self.weights, self.read = padded, weights, read
        self.attend = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, length: Tensor, user: Tensor, item: Tensor) -> Tensor:
        x = torch.cat([user, item.unsqueeze(1)], dim=1)
        places = torch.arange(T + 1, device=user.device)
        is_padding = (places >= length.unsqueeze(1)) & (places < T) if self.padded else None
        y, _ = self.attend(x, x, x, key_padding_mask=is_padding, need_weights=self.weights)
        return self.read(y)


def _encoded(*, padded: bool, weights: bool) -> Block:
    """A candidate's own key takes a product only where it is one of the others."""
    model = Encoded(padded=padded, weights=weights, read=lambda y: y[:, -1])
    keys = T + (padded or weights)
    flops = 2 * D * 3 * D + 2 * 2 * keys * D + 2 * D * D
    return Block(model, (lengths(), history(), floats(D)), ("length", "user"), flops, LINEAR)


@block("A16")
def last_row_of_multihead_attention() -> Block:
    return _encoded(padded=False, weights=False)


@block("A16")
def last_row_of_multihead_attention_with_weights() -> Block:
    return _encoded(padded=False, weights=True)


@block("A16")
def last_row_of_padded_multihead_attention() -> Block:
    return _encoded(padded=True, weights=False)


@block("A16")
def last_row_of_padded_multihead_attention_with_weights() -> Block:
    return _encoded(padded=True, weights=True)


@near_miss("A16")
def all_rows_of_multihead_attention() -> Block:
    model = Encoded(padded=True, weights=False, read=lambda y: y.tanh().sum(1))
    flops = 2 * D * 3 * D + (T + 1) * (2 * 2 * (T + 1) * D + 2 * D * D)
    return Block(model, (lengths(), history(), floats(D)), ("length", "user"), flops, LINEAR)


class AllRows(LastRow):
    def layer(self, x: Tensor) -> Tensor:
        return (x + torch.relu(self.ffn(x))).flip(2).mean(1)


@near_miss("A16")
def all_rows_of_an_encoder() -> Block:
    """Of the projections the user's rows are left out (A1); all rows attend."""
    later = (T + 1) * (2 * 2 * (T + 1) * D + 2 * 2 * D * D)
    model, inputs = AllRows(spelled=False), (history(), floats(D))
    return Block(model, inputs, ("user",), 2 * D * 3 * D + later, LINEAR)


class Spelled(nn.Module):
    """A candidate's attention to a history, spelled out, under a mask that its ids make."""

    def __init__(self, heads: int, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.mask, self.table = heads, mask, embedding()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, seen: Tensor, item: Tensor) -> Tensor:
        keys = self.table(seen)
        q, k, v = self.q(item).unsqueeze(1), self.k(keys), self.v(keys)
        is_padding = (seen == 0)[:, None]
        if self.heads > 1:
            q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
            is_padding = is_padding[:, None]
        scores = torch.matmul(q, k.transpose(-2, -1)) / (D / self.heads) ** 0.5
        weights = torch.softmax(self.mask(scores, is_padding), dim=-1)
        return torch.matmul(weights, v).flatten(1)


def _spelled(heads: int, mask: Callable[[Tensor, Tensor], Tensor]) -> Block:
    """The query's layer, and one row over the history: its keys and values stay at U."""
    seen = ids(T)
    seen[:, 0] = 1
    flops = 2 * D * D + 2 * 2 * T * D
    return Block(Spelled(heads, mask), (seen, floats(D)), ("seen",), flops, LINEAR)


@block("A13")
def spelled_attention_under_a_filled_mask() -> Block:
    return _spelled(1, lambda scores, pad: scores.masked_fill(pad, -1e9))


@block("A13")
def spelled_attention_of_heads_under_an_infinite_mask() -> Block:
    return _spelled(2, lambda scores, pad: scores.masked_fill(pad, -torch.inf))


@block("A13")
def spelled_attention_of_heads_under_an_added_mask() -> Block:
    return _spelled(2, lambda scores, pad: scores + pad.double() * -10000.0)


@block("A13")
def spelled_attention_under_a_mask_by_where() -> Block:
    return _spelled(1, lambda scores, pad: torch.where(pad, -1e9, scores))


@near_miss("A13")
def spelled_attention_of_keys_that_meet_the_candidate() -> Block:
    """Keys that a candidate has changed are its own."""

    def forward(user: Tensor, item: Tensor, table: nn.Module, k: nn.Module) -> Tensor:
        keys = k(torch.tanh(table(user) + item.unsqueeze(1)))
        scores = torch.matmul(item.unsqueeze(1), keys.transpose(1, 2))
        weights = torch.softmax(scores.masked_fill((user == 0)[:, None], -1e9), dim=-1)
        return torch.matmul(weights, keys).squeeze(1)

    flops = 2 * T * D * D + 2 * 2 * T * D
    model = OfTwo(forward, embedding(), nn.Linear(D, D))
    return Block(model, (ids(T), floats(D)), ("user",), flops)


@block("A13")
def attention_over_both_sides() -> Block:
    """A candidate's queries over rows of both sides, spelled out."""

    def forward(user: Tensor, item: Tensor) -> Tensor:
        x = torch.cat([user, item], dim=1)
        weights = torch.softmax(torch.bmm(item[:, :1].tanh(), x.transpose(1, 2)), dim=-1)
        return torch.matmul(weights, x)

    flops = 2 * 2 * (T + 2) * D
    return Block(OfTwo(forward), (history(), history()[:, :2]), ("user",), flops)
