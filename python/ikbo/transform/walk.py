# SPDX-License-Identifier: Apache-2.0
"""One walk over a model: constants, broadcasts and the default treatment of an operator.

A walk knows forms and how to compute with them; it knows neither the graph nor any operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ikbo.transform import fields, merged, results, rowwise, scores
from ikbo.transform import forms as f
from ikbo.transform.constants import Constants
from ikbo.transform.errors import TransformError
from ikbo.transform.experts import Experts
from ikbo.transform.forms import (
    Cand,
    Concat,
    Const,
    Form,
    Merged,
    Pending,
    PerBatch,
    Product,
    Rows,
    Scores,
    Size,
    Sum,
    User,
)
from ikbo.transform.origin import at_origin
from ikbo.transform.rules import rules_of


class Walk:
    """State of one walk.

    Args:
        constants: shared by all walks over a model.
        cand_to_user: int32 `[B]`.
        num_users: U; an int, or a symbol under export.
        fetch: from a constant's name to the tensor to compute with; None reads `constants`.
        experts: layers to compute together, shared by all walks over a model; None joins none.
    """

    def __init__(
        self,
        constants: Constants,
        cand_to_user: Tensor,
        num_users: Any,
        fetch: Callable[[str], Tensor] | None = None,
        experts: Experts | None = None,
    ) -> None:
        self.constants = constants
        self.cand_to_user = cand_to_user
        self.num_users = num_users
        self.num_candidates = cand_to_user.shape[0]
        self.fetch = fetch or constants.tensors.__getitem__
        self.experts = experts or Experts()
        # Nodes that run at B although a rule could split them, and why.
        self.kept: Mapping[str, str] = {}
        # Where the walk is: the model's node, and where the batch is in its result.
        self.node = "?"
        self.node_rows: Rows | None = None
        # Of the node's result: the range of an axis that is read; None for all.
        self.node_live: tuple[int, int, int] | None = None
        self._depth = 0
        # (node, reason) for every user value that had to be broadcast.
        self.broadcasts: list[tuple[str, str]] = []
        self._done: dict[tuple[str, int], tuple[Form, Any]] = {}

    # Constants

    def fold(self, compute: Callable[[], Tensor], name: str, rows: Rows | None = None) -> Const:
        """A constant computed from constants, never in the graph."""
        return Const(self.constants.fold(compute), rows, name)

    def use(self, const: Const) -> Tensor:
        """The tensor of a constant, to compute with in the graph."""
        return self.fetch(self.constants.name(const))

    def once(self, what: str, form: Form, compute: Callable[[], Any]) -> Any:
        """What was computed of a form before, or else now."""
        key = (what, id(form))
        if key not in self._done:
            # The form is kept, since its id is only its own while it lives.
            self._done[key] = (form, compute())
        return self._done[key][1]

    # Values at U and at B

    def at_users(self, form: Const | User) -> Tensor:
        """The value with one row per user; a constant without a batch axis stays as it is."""
        if isinstance(form, User):
            return form.tensor
        tensor = self.use(form)
        return tensor if form.rows is None else f.repeat_row(tensor, form.rows, self.num_users)

    def materialise(self, form: Form, reason: str | None = None) -> Tensor:
        """The value at B. The only place that broadcasts.

        Args:
            form: any form.
            reason: why a user value is needed at B, for the report; None where it is no loss.
        """
        is_new = ("materialise", id(form)) not in self._done
        if reason is not None and is_new and f.holds_user(form):
            self.broadcasts.append((self.node, reason))
        if isinstance(form, Const):
            tensor = self.use(form)
            return (
                tensor
                if form.rows is None
                else f.repeat_row(tensor, form.rows, self.num_candidates)
            )
        if isinstance(form, Cand):
            return form.tensor
        return self.once("materialise", form, lambda: self._broadcast(form))

    def _broadcast(self, form: Form) -> Tensor:
        if isinstance(form, User):
            return self._expand(form)
        if isinstance(form, Concat):
            if form.base is not None:
                return self.materialise(form.base).permute(form.dims)
            return torch.cat([self.materialise(part) for part in form.parts], form.axis)
        if isinstance(form, Merged):
            return self.materialise(form.x).flatten(form.axis, form.axis + 1)
        if isinstance(form, Pending):
            return self.materialise(self.settle(form))
        if isinstance(form, Scores):
            return scores.computed(self, form)
        if isinstance(form, Sum):
            return self.add_up(form)
        assert isinstance(form, PerBatch)
        return form.make(self.num_candidates)

    def _expand(self, user: User) -> Tensor:
        if user.base is not None and user.dims is not None:
            return self.materialise(user.base).permute(user.dims)
        rows = user.rows
        assert rows is not None
        tensor = user.tensor
        if rows.is_plain:
            return torch.ops.ikbo.expand(tensor, self.cand_to_user)
        split = tensor.unflatten(rows.axis, (rows.outer, self.num_users, rows.inner))
        rest = split.movedim(rows.axis + 1, 0)
        gathered = torch.ops.ikbo.expand(rest, self.cand_to_user).movedim(0, rows.axis + 1)
        return gathered.flatten(rows.axis, rows.axis + 2)

    # Pending forms

    def evaluate(self, term: User | Cand | Product) -> User | Cand:
        """The tensor of a term of a `Sum`."""
        if not isinstance(term, Product):
            return term
        with at_origin(term.origin):
            weight = self.use(term.weight)
            bias = None if term.bias is None else self.use(term.bias)
            if term.kind == "linear":
                out = fields.linear(term.x.tensor, weight, bias)
            else:
                out = fields.product(weight, term.x.tensor, bias)
        return type(term.x)(out, term.x.rows)

    def add_up(self, total: Sum, activation: str = "none") -> Tensor:
        """The value of a `Sum` at B, as one ikbo operator where there is one."""
        user, cand = total.user, total.cand
        if isinstance(user, Product) and isinstance(cand, Product) and total.rows.is_plain:
            kind, ndim = user.kind, user.x.tensor.ndim

            def fused(user: Product, cand: Product) -> Tensor:
                return self._fused(user, cand, activation)

            if (kind, cand.kind, ndim) in (("linear", "linear", 2), ("lce", "lce", 3)):
                return self.experts.call(self, user, cand, activation, fused)
            if ndim == 3 and (pair := fields.turned(user, cand)):
                return self.experts.call(self, *pair, activation, fused).mT
        added = self.materialise(self.evaluate(user)) + self.evaluate(cand).tensor
        assert activation == "none", "an activation is only fused into ikbo::linear"
        return added

    def _fused(self, user: Product, cand: Product, activation: str = "none") -> Tensor:
        with at_origin(user.origin):
            weights = self.use(user.weight), self.use(cand.weight)
            bias = None if user.bias is None else self.use(user.bias)
            x_user, x_cand, others = (
                user.x.tensor,
                cand.x.tensor,
                (*weights, bias, self.cand_to_user),
            )
            if user.kind == "lce":
                return fields.lce(x_cand, cand.x.pieces, x_user, *others)
            return torch.ops.ikbo.linear(x_user, x_cand, *others, activation)

    def settle(self, form: Pending) -> Form:
        """Computes what is pending."""
        return self.once("settle", form, lambda: form.settled(self))

    # Operators

    def apply(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of an operator on forms, as a form (or a tuple of forms)."""
        self._depth += 1
        try:
            if self._depth > 1 or self.node not in self.kept:
                return self._apply_once(target, args, kwargs)
            self.broadcasts.append((self.node, self.kept[self.node]))
            where = rowwise.batch_rows(target, args, kwargs) or self.node_rows
            return self._at_candidates(target, args, kwargs, None, where)
        finally:
            self._depth -= 1

    @property
    def live(self) -> tuple[int, int, int] | None:
        """What is read of the result of the model's own operator, not of what its rules apply."""
        return self.node_live if self._depth <= 1 else None

    def _apply_once(self, target: Any, args: Any, kwargs: Any) -> Any:
        view = results.view_of(target, args, kwargs)
        if view is None:
            return self._apply(target, *args, **kwargs)
        what = f"{view.what} {self.live}"
        return self.once(what, view.form, lambda: self._apply(target, *args, **kwargs))

    def _apply(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        for rule in rules_of(target):
            result = rule(self, *args, **kwargs)
            if result is not None:
                return result
        if any(isinstance(x, Pending) for x in f.leaves((args, kwargs))):
            settled = f.map_leaves(
                lambda x: self.settle(x) if isinstance(x, Pending) else x, (args, kwargs)
            )
            return self._apply(target, *settled[0], **settled[1])
        pending = scores.followed(self, target, args, kwargs)
        return self.default(target, args, kwargs) if pending is None else pending

    def default(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result where no rule applies."""
        values = [x for x in f.leaves((args, kwargs)) if isinstance(x, f.FORMS)]
        if rowwise.is_random(target, args, kwargs):
            raise TransformError(
                f"ikbo.transform: {target} draws random numbers, which cannot be the same for all "
                "candidates of a user; call model.eval() or take it out of the model"
            )
        where = rowwise.batch_rows(target, args, kwargs)
        if all(isinstance(x, Const) for x in values):
            has_batch = any(x.rows is not None for x in values)
            has_size = any(isinstance(x, Size) for x in f.leaves((args, kwargs)))
            if where is not None or not (has_batch or has_size):
                return self._constant(target, args, kwargs, where)
        if where is None:
            reason = f"{target} is not known to treat each row of the batch alone"
            return self._at_candidates(target, args, kwargs, reason, self.node_rows)
        if all(map(f.is_user_only, values)):
            return self._at_users(target, args, kwargs, where)
        has_merged = any(isinstance(x, Merged) for x in values)
        distribute = merged.distribute if has_merged else rowwise.distribute
        parts = distribute(self, target, args, kwargs, where)
        if parts is not None:
            return parts
        reason = f"{target} mixes user and candidate values"
        return self._at_candidates(target, args, kwargs, reason, where)

    def _constant(self, target: Any, args: Any, kwargs: Any, where: Any) -> Any:
        names = [x.name for x in f.leaves((args, kwargs)) if isinstance(x, Const)]
        args, kwargs = f.map_leaves(
            lambda x: x.tensor if isinstance(x, Const) else f.at(x, 1), (args, kwargs)
        )
        out = self.constants.fold(lambda: target(*args, **kwargs))
        return results.wrapped(
            lambda t, rows: Const(t, rows, names[0] if names else "constant"), out, where
        )

    def _at_users(self, target: Any, args: Any, kwargs: Any, where: Any) -> Any:
        def read(x: Any) -> Any:
            if isinstance(x, Const | User):
                return self.at_users(x)
            return f.at(x, self.num_users)

        args, kwargs = f.map_leaves(read, (args, kwargs))
        return results.wrapped(User, fields.called(target, args, kwargs), where)

    def _at_candidates(self, target: Any, args: Any, kwargs: Any, reason: Any, where: Any) -> Any:
        def read(x: Any) -> Any:
            if isinstance(x, f.FORMS):
                return self.materialise(x, reason)
            return f.at(x, self.num_candidates)

        args, kwargs = f.map_leaves(read, (args, kwargs))
        return results.wrapped(Cand, fields.called(target, args, kwargs), where)
