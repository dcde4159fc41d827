# SPDX-License-Identifier: Apache-2.0
"""Blocks of public ranking models that pair or pool fields; see `ranking_models`."""

import torch
from torch import Tensor, nn

from tests.transform.mixed_models import OfTwo, embedding, floats, ids
from tests.transform.ranking_models import LINEAR, Block, D, T, block, history, near_miss


class DotInteraction(nn.Module):
    """A dense part and embeddings, their dot products below the diagonal, a top layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        self.dense = nn.Linear(3, D)
        self.top = nn.Linear(D + 21, 2)
        rows, columns = torch.tril_indices(7, 7, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, user: Tensor, item: Tensor) -> Tensor:
        first = torch.relu(self.dense(dense))
        sparse = self.table(torch.cat([user, item], dim=1))
        x = torch.cat([first.unsqueeze(1), sparse], dim=1)
        products = torch.bmm(x, torch.transpose(x, 1, 2))
        flat = products[:, self.rows, self.columns]
        return self.top(torch.cat([first, flat], dim=1))


@block("A6")
def dot_interaction() -> Block:
    """Of five user fields and two of the candidate: products with the two, and the top layer."""
    products = 2 * (2 * 5 + 2 * 2) * D
    top = 2 * (21 - 10) * 2
    at_users = ("aten.linear.default", "aten.embedding.default", "aten.index.Tensor")
    inputs = (floats(3), ids(4), ids(2))
    return Block(DotInteraction(), inputs, ("dense", "user"), products + top, at_users)


@block("A6")
def inner_products_of_pairs() -> Block:
    """Product networks: the same by loops, by lists of columns, and whole.

    Of the whole, a pair and its mirror image meet one column of the layer: 10 of 25 are left.
    """

    def forward(
        user: Tensor, item: Tensor, table: nn.Module, pairs: nn.Module, whole: nn.Module
    ) -> Tensor:
        fields = [table(user[:, i]) for i in range(3)] + [table(item[:, i]) for i in range(2)]
        rows, columns, loop = [], [], []
        for i in range(4):
            for j in range(i + 1, 5):
                rows.append(fields[i])
                columns.append(fields[j])
                loop.append((fields[i] * fields[j]).sum(-1, keepdim=True))
        inner = (torch.stack(rows, 1) * torch.stack(columns, 1)).sum(2)
        x = torch.stack(fields, dim=1)
        matrix = torch.matmul(x, x.transpose(1, 2))
        return pairs(torch.cat([inner, *loop], dim=1)) + whole(matrix.flatten(1))

    model = OfTwo(forward, embedding(), nn.Linear(20, 2), nn.Linear(25, 2))
    flops = 2 * 2 * 7 * 2 + 2 * (2 * 3 + 2 * 2) * D + 2 * (2 * 3 + 2 * 2) * 2
    at_users = ("aten.mul.Tensor", "aten.embedding.default", "aten.view.default")
    return Block(model, (ids(3), ids(2)), ("user",), flops, at_users)


@near_miss("A6")
def dot_interaction_behind_a_softmax() -> Block:
    def forward(user: Tensor, item: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
        x = table(torch.cat([user, item], dim=1))
        weights = torch.softmax(torch.bmm(x, x.transpose(1, 2)), dim=-1)
        return out(weights[:, [0, 1, 2], [1, 2, 4]])

    model = OfTwo(forward, embedding(), nn.Linear(3, 2))
    return Block(model, (ids(3), ids(2)), ("user",), 2 * 25 * D + 2 * 3 * 2)


@block("A7")
def factorisation_block() -> Block:
    """`X (X^T Y)`: no field of the user is repeated, its columns of `X^T Y` are computed once."""

    def forward(user: Tensor, item: Tensor, table: nn.Module, *parts: nn.Module) -> Tensor:
        norm, first, y = parts
        x = table(torch.cat([user, item], dim=1))
        mixed = x.permute(0, 2, 1) @ y.weight.t()
        flat = torch.bmm(x, mixed).view(-1, 6 * 2)
        return torch.relu(first(norm(flat)))

    parts = [nn.LayerNorm(12), nn.Linear(12, 5), nn.Linear(6, 2)]
    flops = 2 * 2 * D * 2 + 2 * 6 * D * 2 + 2 * 12 * 5
    at_users = ("aten.embedding.default", "aten.matmul.default")
    model = OfTwo(forward, embedding(), *parts)
    return Block(model, (ids(4), ids(2)), ("user",), flops, at_users)


@block("A20")
def compressions_of_the_same_fields() -> Block:
    def forward(user: Tensor, item: Tensor, *layers: nn.Module) -> list[Tensor]:
        x = torch.cat([user, item], dim=1)
        first, second, third = (layer(x.transpose(1, 2)).transpose(1, 2) for layer in layers)
        return [first.tanh() * second, third.sigmoid()]

    layers = [nn.Linear(6, m, bias=m == 5) for m in (3, 3, 5)]
    inputs = (floats(4, D), floats(2, D))
    return Block(OfTwo(forward, *layers), inputs, ("user",), 2 * 2 * D * 11, LINEAR)


@near_miss("A7")
def factorisation_of_gated_fields() -> Block:
    def forward(user: Tensor, item: Tensor, table: nn.Module) -> Tensor:
        x = table(torch.cat([user, item], dim=1))
        x = x * torch.softmax(x.mean(2), dim=1).unsqueeze(2)
        return torch.bmm(x, torch.bmm(x.transpose(1, 2), x.tanh())).flatten(1)

    flops = 2 * 2 * 6 * D * D
    return Block(OfTwo(forward, embedding()), (ids(4), ids(2)), ("user",), flops)


@block("A8")
def bilinear_interaction() -> Block:
    """Falls out of loops over fields; only pairs with a candidate's field are left."""

    def forward(user: Tensor, item: Tensor, table: nn.Module, *layers: nn.Module) -> Tensor:
        every, first, second, third, out = layers
        fields = torch.split(table(torch.cat([user, item], dim=1)), 1, dim=1)
        pairs = [(i, j) for i in range(3) for j in range(i + 1, 4)]
        each = (first, second, third)
        p = [torch.mul(every(fields[i]), fields[j]) for i, j in pairs]
        q = [torch.mul(each[i](fields[i]), fields[j]) for i, j in pairs]
        return out(torch.cat([*p, *q], dim=1).flatten(1))

    model = OfTwo(
        forward, embedding(), *(nn.Linear(D, D, bias=False) for _ in range(4)), nn.Linear(12 * D, 1)
    )
    flops = 2 * 6 * D
    at_users = ("aten.linear.default", "aten.mul.Tensor")
    return Block(model, (ids(3), ids(1)), ("user",), flops, at_users)


@block("A8")
def field_aware_pairs() -> Block:
    """Falls out: one table per pair of fields."""

    def forward(x: Tensor, y: Tensor, *tables: nn.Module) -> Tensor:
        ids = torch.cat([x, y], dim=1)
        views = [table(ids) for table in tables]
        pairs = [(i, j) for i in range(3) for j in range(i + 1, 4)]
        crosses = [views[j][:, i] * views[i][:, j] for i, j in pairs]
        return torch.stack(crosses, dim=1).sum(dim=(1, 2))

    model = OfTwo(forward, *(nn.Embedding(30, D) for _ in range(4)))
    at_users = ("aten.embedding.default", "aten.mul.Tensor", "aten.sum.dim_IntList")
    return Block(model, (ids(3), ids(1)), ("user",), 0, at_users)


@near_miss("A8")
def bilinear_interaction_of_gated_fields() -> Block:
    def forward(user: Tensor, item: Tensor, table: nn.Module, every: nn.Module) -> Tensor:
        x = table(torch.cat([user, item], dim=1))
        x = x * torch.softmax(x.mean(2), dim=1).unsqueeze(2)
        fields = torch.split(x, 1, dim=1)
        return torch.cat([every(fields[i]) * fields[i + 1] for i in range(3)], dim=1).flatten(1)

    model = OfTwo(forward, embedding(), nn.Linear(D, D))
    return Block(model, (ids(3), ids(1)), ("user",), 3 * 2 * D * D)


class CompressedInteraction(nn.Module):
    """Outer products of the fields, compressed by convolutions; half goes on, half is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        self.convs = nn.ModuleList([nn.Conv1d(25, 6, 1), nn.Conv1d(15, 4, 1)])
        self.out = nn.Linear(7, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x0 = self.table(torch.cat([user, item], dim=1))
        hidden, kept = x0, []
        for number, conv in enumerate(self.convs):
            outer = torch.einsum("bhd,bmd->bhmd", hidden, x0)
            outer = outer.reshape(x0.size(0), hidden.size(1) * x0.size(1), D)
            now = torch.relu(conv(outer))
            hidden, read = torch.split(now, 3, dim=1) if number == 0 else (None, now)
            kept.append(read)
        return self.out(torch.cat(kept, dim=1).sum(-1))


@block("A11")
def compressed_interaction() -> Block:
    """Layer 1: of 25 pairs the 16 with a candidate's field; layer 2 as it was."""
    flops = 2 * 16 * 6 * D + 2 * 15 * 4 * D + 2 * 7
    at_users = ("aten.embedding.default", "aten.view.default")
    return Block(CompressedInteraction(), (ids(3), ids(2)), ("user",), flops, at_users)


@near_miss("A11")
def compressed_interaction_of_hidden_fields() -> Block:
    def forward(user: Tensor, item: Tensor, table: nn.Module, conv: nn.Module) -> Tensor:
        x0 = table(torch.cat([user, item], dim=1))
        hidden = x0.flip(1).softmax(dim=1)
        outer = torch.einsum("bhd,bmd->bhmd", hidden, x0).reshape(-1, 25, D)
        return conv(outer).sum(1)

    model = OfTwo(forward, embedding(), nn.Conv1d(25, 6, 1))
    return Block(model, (ids(3), ids(2)), ("user",), 2 * 25 * 6 * D)


@block("A19")
def pools_over_both_sides() -> Block:
    def forward(user: Tensor, item: Tensor, first: nn.Module, out: nn.Module) -> Tensor:
        x = torch.tanh(first(torch.cat([user, item], dim=1)))
        top, place = x.max(dim=1)
        pools = [x.mean(1), x.sum(1), x.amax(1), x.logsumexp(1), top, torch.min(x, 1).values]
        return out(torch.cat(pools, dim=1)) + place.to(x.dtype).sum(1, keepdim=True)

    model = OfTwo(forward, nn.Linear(D, 3), nn.Linear(18, 1))
    inputs = (history(), history()[:, :2])
    flops = 2 * 2 * D * 3 + 2 * 18
    return Block(model, inputs, ("user",), flops, ("aten.linear.default", "aten.tanh.default"))


@near_miss("A19")
def median_over_both_sides() -> Block:
    def forward(user: Tensor, item: Tensor, out: nn.Module) -> Tensor:
        return out(torch.cat([user, item], dim=1).median(dim=1).values)

    model = OfTwo(forward, nn.Linear(D, 3))
    return Block(model, (history(), history()[:, :2]), ("user",), 2 * D * 3)


@block("A18")
def encoders_of_a_history() -> Block:
    """Falls out: recurrent nets, an encoder and pools of the user alone run at U."""

    class Encoders(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(D, D, batch_first=True)
            self.lstm = nn.LSTM(D, D, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True)
            self.out = nn.Linear(4 * D, 1)

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            hidden, _ = self.gru(user)
            last = self.lstm(hidden)[0][:, -1]
            sequence = self.encoder(hidden)
            pooled = sequence.mean(1) + sequence.amax(1)
            return self.out(torch.cat([pooled, last, hidden[:, -1], item], dim=1))

    at_users = ("aten.gru.input", "aten.lstm.input", "aten.layer_norm.default")
    return Block(Encoders(), (history(), floats(D)), ("user",), 2 * D, at_users)


@near_miss("A18")
def encoder_of_both_sides() -> Block:
    def forward(user: Tensor, item: Tensor, gru: nn.Module) -> Tensor:
        return gru(torch.cat([user, item], dim=1))[0][:, -1]

    flops = 2 * (T + T) * 3 * (D * D + D * D)
    model = OfTwo(forward, nn.GRU(D, D, batch_first=True))
    return Block(model, (history(), history()), ("user",), flops)


@block("A21")
def search_in_a_long_history() -> Block:
    """Keys projected once, the best for each candidate picked, attended."""

    def forward(user: Tensor, item: Tensor, key: nn.Module, value: nn.Module) -> Tensor:
        k, v = key(user), value(user)
        scores = torch.bmm(k, item.unsqueeze(2)).squeeze(2)
        best, places = torch.topk(scores, 3, dim=1)
        picked = torch.gather(v, 1, places.unsqueeze(-1).expand(-1, -1, D))
        few = torch.gather(k, 1, places[:, :2].unsqueeze(-1).repeat(1, 1, D))
        return (best.softmax(1).unsqueeze(-1) * picked).sum(1) + few.tanh().sum(1)

    model = OfTwo(forward, nn.Linear(D, D), nn.Linear(D, D))
    return Block(model, (history(), floats(D)), ("user",), 2 * T * D, ("aten.linear.default",))


@near_miss("A21")
def search_among_own_rows() -> Block:
    def forward(user: Tensor, item: Tensor, key: nn.Module) -> Tensor:
        k = key(item * user[:, :1])
        places = k.sum(-1).topk(2, dim=1).indices
        return torch.gather(k, 1, places.unsqueeze(-1).expand(-1, -1, D)).sum(1)

    model = OfTwo(forward, nn.Linear(D, D))
    return Block(model, (history(), history()), ("user",), 2 * T * D * D)
