# SPDX-License-Identifier: Apache-2.0
"""Models with user and candidate features in one tensor, one pattern of public code each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 40
IDS = 30
L = 6  # history length
D = 4


@dataclass(frozen=True)
class Mixed:
    """A model in fp64, its inputs (one batch), and what of them is the user's.

    `at_users` names operators of which at least one call must run at U, whole or in part.
    """

    model: nn.Module
    inputs: Any
    users: tuple[str, ...]
    at_users: tuple[str, ...]
    columns: dict[str, Any] = field(default_factory=dict)
    row_counts: dict[str, int] = field(default_factory=dict)


MIXED: dict[str, Callable[[], Mixed]] = {}


def mixed(make: Callable[[], Mixed]) -> Callable[[], Mixed]:
    def seeded() -> Mixed:
        torch.manual_seed(5)
        made = make()
        made.model.double().eval()
        return made

    MIXED[make.__name__] = seeded
    return seeded


def ids(width: int) -> Tensor:
    """Ids of which 0 is padding."""
    return torch.randint(IDS, (ROWS, width)) * (torch.rand(ROWS, width) < 0.8)


def floats(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float64)


class Function(nn.Module):
    """A model that is one function of its inputs and of its parts."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)


class OfX(Function):
    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.parts)


class OfTwo(Function):
    def forward(self, user: Tensor, item: Tensor) -> Any:
        return self.function(user, item, *self.parts)


def embedding() -> nn.Embedding:
    return nn.Embedding(IDS, D, padding_idx=0)


class PackedRanker(nn.Module):
    """All features in one float matrix: ids cast and looked up, a history with its length, dense
    columns, first and second order, a deep net."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: embedding() for name in ("user", "city", "item")})
        self.first = nn.ModuleDict({name: nn.Embedding(IDS, 1) for name in self.tables})
        self.dense = nn.Parameter(torch.randn(3, 1))
        self.deep = nn.Sequential(
            nn.Linear(4 * D + 3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1, bias=False)
        )
        self.bias = nn.Parameter(torch.zeros(1))
        self.place = {
            "user": (0, 1), "age": (1, 2), "item": (2, 3), "price": (3, 4), "city": (4, 5),
            "history": (5, 5 + L), "length": (5 + L, 6 + L), "visits": (6 + L, 7 + L),
        }  # fmt: skip

    def columns(self, x: Tensor, name: str) -> Tensor:
        return x[:, self.place[name][0] : self.place[name][1]]

    def pooled(self, x: Tensor) -> Tensor:
        events = self.tables["item"](self.columns(x, "history").long())
        length = self.columns(x, "length").long()
        mask = torch.arange(L, device=x.device) < length
        total = (events * mask.unsqueeze(-1).to(events.dtype)).sum(1, keepdim=True)
        return total / (length.to(events.dtype).unsqueeze(-1) + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        fields = [table(self.columns(x, n).long()) for n, table in self.tables.items()]
        fields.append(self.pooled(x))
        firsts = [table(self.columns(x, n).long()) for n, table in self.first.items()]
        dense = [self.columns(x, n) for n in ("age", "price", "visits")]
        logit = torch.zeros([x.shape[0], 1], dtype=x.dtype).to(x.device)
        logit += torch.sum(torch.cat(firsts, dim=-1), dim=-1, keepdim=False)
        logit += torch.cat(dense, dim=-1).matmul(self.dense)
        e = torch.cat(fields, dim=1)
        square = torch.pow(torch.sum(e, dim=1, keepdim=True), 2)
        logit += 0.5 * torch.sum(square - torch.sum(e * e, dim=1, keepdim=True), dim=2)
        wide = torch.flatten(torch.cat(fields, dim=-1), start_dim=1)
        wide = torch.cat([wide, torch.flatten(torch.cat(dense, dim=-1), start_dim=1)], dim=-1)
        return torch.sigmoid(logit + self.deep(wide) + self.bias)


@mixed
def packed_float_matrix() -> Mixed:
    model = PackedRanker()
    x = torch.cat(
        [ids(1), floats(1), ids(1), floats(1), ids(1), ids(L), torch.randint(1, L + 1, (ROWS, 1)),
         floats(1)], 1,
    )  # fmt: skip
    users = tuple(f"x.{name}" for name in ("user", "age", "city", "history", "length", "visits"))
    at_users = ("aten.embedding.default", "aten.linear.default", "aten.div.Tensor")
    return Mixed(model, (x,), users, at_users, {"x": model.place})


@mixed
def index_lists_in_any_order() -> Mixed:
    def forward(x: Tensor, table: nn.Module, first: nn.Module) -> Tensor:
        fields = table(x[:, [4, 0, 3, 1]])
        again = x[:, torch.tensor([2, 2, 0])] + x.index_select(1, torch.tensor([0, -1 % 5, 4]))
        return first(fields.flatten(1)) + table(x[:, [0, 1]]).tanh().sum((1, 2))[:, None] + again

    model = OfX(forward, embedding(), nn.Linear(4 * D, 3))
    return Mixed(model, (ids(5),), ("x[:, 0:2]", "x[:, 4]"), ("aten.embedding.default",))


@mixed
def pairs_of_fields() -> Mixed:
    def forward(x: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
        fields = table(x)
        rows, cols = [], []
        for i in range(4):
            for j in range(i + 1, 5):
                rows.append(i)
                cols.append(j)
        p, q = fields[:, rows], fields[:, cols]
        return out(torch.sum(p * q, dim=2))

    model = OfX(forward, embedding(), nn.Linear(10, 1))
    return Mixed(model, (ids(5),), ("x[:, :3]",), ("aten.mul.Tensor", "aten.embedding.default"))


class OneTable(nn.Module):
    """Ids of all fields, shifted into one table."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = [0, IDS, 2 * IDS, 3 * IDS]
        self.table = nn.Embedding(4 * IDS, D)
        self.norm = nn.LayerNorm(D)
        self.deep = nn.Linear(4 * D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets).unsqueeze(0)
        return self.deep(self.norm(self.table(x)).view(-1, 4 * D))


@mixed
def one_table_with_offsets() -> Mixed:
    at_users = ("aten.embedding.default", "aten.layer_norm.default", "aten.linear.default")
    return Mixed(OneTable(), {"x": ids(4)}, ("x[:, [0, 2]]",), at_users)


class Constants(nn.Module):
    """A table of vectors that is no parameter of an embedding, read by history and candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.randn(IDS, D))
        self.register_buffer("category", torch.randint(IDS, (IDS,)))
        self.table = embedding()

    def forward(self, user: Tensor, item: Tensor) -> dict[str, Tensor]:
        both = torch.cat([user, item], dim=1)
        named = self.table(both)
        category = self.table(self.category[both])
        vectors = self.vectors[both]
        flat = torch.index_select(self.vectors, 0, both.reshape(-1)).view(-1, L + 1, D)
        taken = torch.gather(self.category.expand(both.shape[0], -1), 1, both)
        x = (named + category + vectors + flat).tanh()
        history, target = x[:, :L], x[:, L:]
        score = (history * target).sum(-1).softmax(-1)
        return {"seen": (score.unsqueeze(-1) * history).sum(1), "taken": taken[:, 1:] * item}


@mixed
def history_and_candidate_before_the_table() -> Mixed:
    at_users = ("aten.embedding.default", "aten.index.Tensor", "aten.tanh.default")
    return Mixed(Constants(), (ids(L), ids(1)), ("user",), at_users)


@mixed
def batch_merged_and_taken_apart() -> Mixed:
    def forward(user: Tensor, item: Tensor, table: nn.Module, tower: nn.Module) -> Tensor:
        both = torch.cat([user, item.unsqueeze(1)], dim=1)
        x = table(both.view(-1))
        x = tower(x).view(both.shape[0], L + 1, D)
        return (x[:, :-1] * x[:, -1:]).sum(-1)

    tower = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, D))
    model = OfTwo(forward, embedding(), tower)
    at_users = ("aten.linear.default", "aten.layer_norm.default", "aten.embedding.default")
    return Mixed(model, (ids(L), ids(1)[:, 0]), ("user",), at_users)


class Flat(nn.Module):
    """Ids of history and candidate in one vector, the length and an offset for every event."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        self.tower = nn.Linear(D + 2, D)

    def forward(self, ids: Tensor, ages: Tensor, events: Tensor) -> Tensor:
        x = self.table(ids) * (ids != 0).unsqueeze(-1) + ages.unsqueeze(-1)
        x = self.tower(torch.cat([x, events], dim=-1)).tanh().view(-1, L + 1, D)
        return (x[:, :L] * x[:, L:]).sum((1, 2))


@mixed
def one_dimensional_ids() -> Mixed:
    inputs = (ids(L + 1).flatten(), floats(L + 1).flatten(), floats(L + 1, 2).flatten(0, 1))
    users = tuple(f"{name}[:, :{L}]" for name in ("ids", "ages", "events"))
    counts = dict.fromkeys(("ids", "ages", "events"), L + 1)
    at_users = ("aten.embedding.default", "aten.tanh.default", "aten.linear.default")
    return Mixed(Flat(), inputs, users, at_users, row_counts=counts)


@mixed
def sequence_first() -> Mixed:
    def forward(user: Tensor, item: Tensor, gru: nn.Module, attend: nn.Module) -> Tensor:
        steps = user.transpose(0, 1)
        seen, last = gru(steps)
        query = item.unsqueeze(0)
        out, _ = attend(query, seen, seen, need_weights=False)
        return torch.cat([out.squeeze(0), last.squeeze(0), item], dim=-1)

    model = OfTwo(forward, nn.GRU(D, D), nn.MultiheadAttention(D, 2))
    return Mixed(model, (floats(L, D), floats(D)), ("user",), ("aten.gru.input",))


class Repeated(nn.Module):
    """A learned token and position embeddings, repeated to the batch in several spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(D))
        self.positions = nn.Embedding(L, D)
        self.mix = nn.Linear(D, D)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        batch = user.shape[0]
        start = self.token.repeat(batch, 1).unsqueeze(1)
        tiled = torch.tile(self.token, (batch, 1, 1))
        places = torch.arange(L, device=user.device).unsqueeze(0).repeat(batch, 1)
        again = torch.arange(L, device=user.device).unsqueeze(0).expand(batch, L)
        spread = self.token.unsqueeze(0).repeat_interleave(batch, dim=0)
        tokens = user + self.positions(places) + self.positions(again)
        sequence = torch.cat([start, tiled, tokens, spread.unsqueeze(1)], dim=1)
        pooled = self.mix(sequence).tanh().mean(1)
        return (pooled * item).sum(-1)


@mixed
def constants_repeated_to_the_batch() -> Mixed:
    at_users = ("aten.linear.default", "aten.tanh.default", "aten.mean.dim")
    return Mixed(Repeated(), (floats(L, D), floats(D)), ("user",), at_users)


class Lengths(nn.Module):
    """Masks and lengths out of ids, with the candidate's id behind the history's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        self.tower = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        history, target = x[:, :L], x[:, L]
        mask = (x != 0)[:, :L]
        length = mask.sum(dim=1)
        events = self.table(x)[:, :L]
        last = torch.gather(events, 1, (length - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, D))
        weight = torch.arange(L, device=x.device)[None, :] < length[:, None]
        hidden = self.tower(events).masked_fill(~weight.unsqueeze(-1), 0.0)
        mean = hidden.sum(1) / length.clamp(min=1).unsqueeze(-1)
        user = torch.where(length[:, None] > 0, mean, last.squeeze(1))
        return (user * self.table(target)).sum(-1) + (history == target[:, None]).sum(-1)


@mixed
def masks_and_lengths_from_ids() -> Mixed:
    at_users = ("aten.embedding.default", "aten.linear.default", "aten.gather.default")
    return Mixed(Lengths(), (ids(L + 1).double(),), (f"x[:, :{L}]",), at_users)


class Interleaved(nn.Module):
    """Tokens of items and of actions in turn; fields in turn; columns taken apart unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.out = nn.Linear(2 * D, D)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        user, item = batch["user"], batch["item"]
        b = item["token"].shape[0]
        items = torch.cat([user["items"], item["token"].unsqueeze(1)], dim=1)
        actions = torch.cat([user["actions"], item["action"].unsqueeze(1)], dim=1)
        turns = self.norm(torch.stack([items, actions], dim=2).reshape(b, -1, D))
        history, target = turns.split([2 * L, 2], dim=1)
        first, rest, last = torch.cat([user["dense"], item["dense"]], -1).tensor_split((1, 5), -1)
        fields = torch.stack([user["dense"], item["dense"], user["dense"].cos()], dim=1)
        low, mid, high = torch.tensor_split(fields.tanh(), 3, dim=1)
        pooled = self.out(torch.cat([(low * high).flatten(1), history.mean(1)], dim=1))
        return (
            pooled * target.sum(1) + mid.squeeze(1) + first + (rest.sum(-1) + last.sum(-1))[:, None]
        )


@mixed
def pieces_interleaved() -> Mixed:
    user = {"items": floats(L, D), "actions": floats(L, D), "dense": floats(D)}
    item = {"token": floats(D), "action": floats(D), "dense": floats(D)}
    at_users = ("aten.layer_norm.default", "aten.mul.Tensor", "aten.cos.default")
    return Mixed(Interleaved(), ({"user": user, "item": item},), ("user",), at_users)


class Experts(nn.Module):
    """Experts and gates over users alone, over candidates, and over both."""

    def __init__(self) -> None:
        super().__init__()
        self.user_experts = nn.ModuleList(nn.Linear(D, 5) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(2 * D, 5) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(D, 4) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(5, 1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        user = x[:, :D]
        own = [torch.relu(expert(user)) for expert in self.user_experts]
        both = [torch.relu(expert(x)) for expert in self.experts]
        experts = torch.stack([*own, *both], dim=1)
        gates = [torch.softmax(gate(user), dim=-1) for gate in self.gates]
        mixed = [torch.bmm(gate.unsqueeze(1), experts).squeeze(1) for gate in gates]
        return [torch.sigmoid(t(m)) for t, m in zip(self.towers, mixed, strict=True)]


@mixed
def gates_and_experts_of_users() -> Mixed:
    at_users = ("aten.softmax.int", "aten.relu.default", "aten.linear.default")
    return Mixed(Experts(), (floats(2 * D),), (f"x[:, :{D}]",), at_users)


class Causal(nn.Module):
    """A decoder over history and candidate tokens, in one sequence, tokens merged with the batch
    for its feed-forward layers."""

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.table = embedding()
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.ffn = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.norm = nn.LayerNorm(D)
        self.mask = mask

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        ids = torch.cat([user, item], dim=1)
        x = self.table(ids)
        b, t, d = x.shape
        for qkv, ffn in zip(self.qkv, self.ffn, strict=True):
            q, k, v = (
                y.view(b, t, 2, d // 2).transpose(1, 2) for y in qkv(self.norm(x)).chunk(3, dim=-1)
            )
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=self.mask, is_causal=self.mask is None
            )
            x = x + y.transpose(1, 2).reshape(b, t, d)
            x = x + torch.relu(ffn(x.reshape(b * t, d))).view(b, t, d)
        return x[:, L:].sum(-1)


@mixed
def causal_mask() -> Mixed:
    at_users = ("aten.linear.default", "aten.scaled_dot_product_attention.default")
    return Mixed(Causal(None), (ids(L), ids(1)), ("user",), at_users)


@mixed
def candidates_that_do_not_see_each_other() -> Mixed:
    """Every token sees the history before it and itself."""
    places = torch.arange(L + 3)
    mask = (places[None] <= places[:, None]) & (
        (places[None] < L) | (places[None] == places[:, None])
    )
    at_users = ("aten.linear.default", "aten.scaled_dot_product_attention.default")
    return Mixed(Causal(mask), (ids(L), ids(3)), ("user",), at_users)


class Encoder(nn.Module):
    """PyTorch's own encoder, causal by a mask, its tokens first and normalised at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        layer = nn.TransformerEncoderLayer(D, 2, 8)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(L + 1, dtype=torch.float64)
        self.register_buffer("mask", mask)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        tokens = self.table(torch.cat([user, item], dim=1)).transpose(0, 1)
        last = self.layers(tokens, mask=self.mask)[-1]
        return functional.normalize(last, dim=-1)


@mixed
def causal_encoder_of_torch() -> Mixed:
    at_users = ("aten.linear.default", "aten.scaled_dot_product_attention.default")
    return Mixed(Encoder(), (ids(L), ids(1)), ("user",), at_users)


@mixed
def normalised_fields() -> Mixed:
    def forward(x: Tensor, table: nn.Module, out: nn.Module) -> Tensor:
        fields = table(x.flatten()).view(-1, 5, D)
        return out(functional.normalize(fields, dim=-1).flatten(1)).tanh()

    model = OfX(forward, embedding(), nn.Linear(5 * D, 2))
    return Mixed(model, (ids(5),), ("x[:, 1:4]",), ("aten.div.Tensor", "aten.embedding.default"))


class WithWeights(nn.Module):
    """PyTorch's attention as it is when it returns its weights too, padding multiplied away."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        self.places = nn.Embedding(L + 1, D)
        self.norm = nn.LayerNorm(D)
        self.attend = nn.ModuleList(nn.MultiheadAttention(D, 2) for _ in range(2))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        ids = torch.cat([user, item], dim=1)
        is_there = (ids != 0).unsqueeze(-1)
        x = self.table(ids) * D**0.5
        x = x + self.places(torch.arange(L + 1).unsqueeze(0).repeat(ids.shape[0], 1))
        x = x * is_there
        mask = ~torch.tril(torch.ones((L + 1, L + 1), dtype=torch.bool))
        for attend in self.attend:
            turned = x.transpose(0, 1)
            seen, _ = attend(self.norm(turned), turned, turned, attn_mask=mask)
            x = (turned + seen).transpose(0, 1) * is_there
        return (x[:, -1] * self.table(item)[:, 0]).sum(-1)


@mixed
def causal_attention_with_weights() -> Mixed:
    at_users = ("aten.linear.default", "aten.softmax.int", "aten.bmm.default")
    return Mixed(WithWeights(), (ids(L), ids(1)), ("user",), at_users)


class Pointwise(nn.Module):
    """Attention without a softmax: gated, biased by distance, masked by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding()
        self.norm = nn.LayerNorm(D)
        self.uvqk = nn.ModuleList(nn.Linear(D, 8 * D, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(L + 2, L + 2))
        self.register_buffer("mask", torch.ones(L + 2, L + 2).tril())

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = self.table(torch.cat([user, item], dim=1))
        b, n, _ = x.shape
        for uvqk, out in zip(self.uvqk, self.out, strict=True):
            u, v, q, k = functional.silu(uvqk(self.norm(x))).split(2 * D, dim=-1)
            q, k, v = (y.view(b, n, 2, D) for y in (q, k, v))
            scores = torch.einsum("bnhd,bmhd->bhnm", q, k) + self.bias
            weights = functional.silu(scores) / n * self.mask
            seen = torch.einsum("bhnm,bmhd->bnhd", weights, v).reshape(b, n, 2 * D)
            x = x + out(u * functional.layer_norm(seen, [2 * D]))
        return x[:, L:].sum((1, 2))


@mixed
def causal_pointwise_attention() -> Mixed:
    at_users = ("aten.linear.default", "aten.silu.default", "aten.einsum.default")
    return Mixed(Pointwise(), (ids(L), ids(2)), ("user",), at_users)


class PaddedCausal(nn.Module):
    """Causal encoders that leave padding out, one by PyTorch, one by a mask of both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(IDS, D)
        layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("lower", torch.ones(L + 1, L + 1, dtype=torch.bool).tril())

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        ids = torch.cat([user, item], dim=1)
        x = self.table(ids)
        x = self.layers(x, mask=~self.lower, src_key_padding_mask=ids == 0)
        both = (ids > 0)[:, None, None, :] & self.lower
        q = x.view(-1, L + 1, 2, D // 2).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, q.tanh(), q, attn_mask=both)
        return out[:, :, -1].flatten(1)


@mixed
def causal_attention_with_padding() -> Mixed:
    at_users = ("aten.linear.default", "aten.scaled_dot_product_attention.default")
    user = torch.cat([torch.randint(1, IDS, (ROWS, 1)), ids(L - 1)], 1)
    return Mixed(PaddedCausal(), (user, ids(1)), ("user",), at_users)


class Turns(nn.Module):
    """Columns of both sides in turn, one by one, and fields looked up one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(IDS, D) for _ in range(12))
        self.deep = nn.Linear(24, 3)
        self.out = nn.Linear(12 * D, 1)

    def forward(self, x: Tensor, user: Tensor, item: Tensor) -> Tensor:
        turns = torch.stack([user, item], dim=-1).flatten(1)
        deep = self.deep(turns.tanh() * 2 + turns)
        fields = torch.cat([t(x[:, i : i + 1]) for i, t in enumerate(self.tables)], dim=1)
        fields = functional.normalize(fields, dim=-1).sigmoid()
        return self.out(fields.view(-1, 12 * D)) + deep


@mixed
def columns_interleaved_one_by_one() -> Mixed:
    at_users = ("aten.tanh.default", "aten.sigmoid.default", "aten.linear.default")
    return Mixed(Turns(), (ids(12), floats(12), floats(12)), ("user", "x[:, :9]"), at_users)
