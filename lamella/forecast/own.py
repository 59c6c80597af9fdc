"""A family's own norms, attention inputs and MLPs under autograd, played on paper (`tape.py`): on a GPU, and on CPUs without the
instructions of the fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamella.forecast.blocks import Attention, Mlp, Norm
from lamella.forecast.tape import Linears, Saved, Tape


@dataclass(frozen=True)
class OwnNorm(Norm):
    """x.float(), its square, mean and inverse root, their product, the dtype again, times the weight."""

    def keeps_input(self, t: Tape) -> bool:
        return t.element == 4

    def forward(self, t: Tape, n: int, saved: Saved, name: str) -> float:
        wide = t.new(n * self.width, 4) if t.element < 4 else 0.0
        square, mean = t.new(n * self.width, 4), t.new(n, 4)
        t.free(square)
        root = t.new(n, 4)
        scaled = t.new(n * self.width, 4)
        t.free(mean)
        if not t.keeps:
            t.free(wide)
        narrow = t.new(n * self.width) if t.element < 4 else 0.0
        y = t.new(n * self.width)
        t.free(narrow, scaled)
        if not t.keeps:
            t.free(root)
            wide = root = 0.0
        saved[name] = wide + root
        return y

    def backward(self, t: Tape, n: int, saved: Saved, name: str, dy: float) -> float:
        scaled = t.new(n * self.width)
        t.free(dy)
        if t.element < 4:
            wide = t.new(n * self.width, 4)
            t.free(scaled)
            scaled = wide
        part, dot = t.new(n * self.width, 4), t.new(n * self.width, 4)
        t.free(dot, scaled)
        few = [t.new(n * self.width, 4) for _ in range(4)]
        t.free(*few[:3], saved.pop(name))
        total = t.new(n * self.width, 4)
        t.free(part, few[3])
        if t.element < 4:
            narrow = t.new(n * self.width)
            t.free(total)
            total = narrow
        return total


@dataclass(frozen=True)
class OwnAttention(Attention):
    """Projections one by one, norms over the heads, q cos + half-turned q sin, likewise k."""

    def _each(self) -> list[Linears]:
        return [Linears(self.qkv.inputs, (o,), (r,), self.qkv.dropout, False)
                for o, r in zip(self.qkv.outputs, self.qkv.ranks, strict=True)]  # fmt: skip

    @property
    def keeps_input(self) -> bool:  # type: ignore[override]
        return bool(self.qkv.rank)

    def _turn(self, t: Tape, values: float) -> float:
        cosine = t.new(values)
        negated = t.new(values / 2)
        half = t.new(values)
        t.free(negated)
        sine = t.new(values)
        t.free(half)
        turned = t.new(values)
        t.free(sine, cosine)
        return turned

    def forward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved) -> float:
        core = self.core
        made, kept_xa = [], 0.0
        for k, linear in enumerate(self._each()):
            y, xa = linear.forward(t, n)
            kept_xa += sum(t.let_go(xa))
            if self.head_norms and k < 2:
                heads = (core.heads, core.kv_heads)[k]
                norm = OwnNorm(core.head_dim)
                normed = norm.forward(t, n * heads, saved, f"head_norm{k}")
                if not (norm.keeps_input(t) and t.keeps):
                    t.free(y)
                else:
                    saved[f"head_norm{k}"] += y
                y = normed
            made.append(y)
        turned = [self._turn(t, n * heads * core.head_dim) for heads in (core.heads, core.kv_heads)]
        t.free(*made[:2])
        saved["y"], saved["turned"] = made[2], sum(turned)
        out = (self._kernel if self.by_kernel else self._torch)(t, n, lengths, saved)
        result, out_xa = self.out.forward(t, n)
        if not t.keeps:
            t.free(out_xa, out, saved.pop("y"), saved.pop("turned"))
            return result
        saved |= {"xa": kept_xa, "out": out, "out_xa": out_xa}
        if not self.by_kernel:
            gone = ["turned", "y"] + ([] if self.out.rank else ["out"])
            t.free(*(saved[name] for name in gone))
            saved |= dict.fromkeys(gone, 0.0)
        return result

    def backward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved, dy: float) -> float:
        core = self.core
        dout = self.out.backward(t, n)
        t.free(saved.pop("out_xa"), dy, 0.0 if self.by_kernel else saved.pop("out"))
        dq, dk, dv = (self._kernel_back if self.by_kernel else self._torch_back)(t, n, lengths, saved, dout)
        before: list[float] = []
        for k, gradient in ((1, dk), (0, dq)):
            turned = self._turn_back(t, n * (core.heads, core.kv_heads)[k] * core.head_dim, gradient)
            if self.head_norms:
                turned = OwnNorm(core.head_dim).backward(
                    t, n * (core.heads, core.kv_heads)[k], saved, f"head_norm{k}", turned
                )
            before.insert(0, turned)
        dx = 0.0
        for linear, gradient in zip(reversed(self._each()), (dv, before[1], before[0]), strict=True):
            flat = t.new(n * linear.wide)
            t.free(gradient)
            more = linear.backward(t, n)
            t.free(flat)
            if dx:
                total = t.new(n * self.hidden)
                t.free(dx, more)
                more = total
            dx = more
        t.free(saved.pop("xa"))
        return dx

    def _turn_back(self, t: Tape, values: float, gradient: float) -> float:
        sine = t.new(values)
        negated = t.new(values / 2)
        one = t.new(values)
        t.free(negated)
        two = t.new(values)
        t.free(sine)
        half = t.new(values)
        t.free(one, two)
        cosine = t.new(values)
        t.free(gradient)
        total = t.new(values)
        t.free(half, cosine)
        return total


@dataclass(frozen=True)
class OwnMlp(Mlp):
    """down(act(gate(x)) * up(x)), each step's result under autograd."""

    def _each(self) -> list[Linears]:
        return [Linears(self.first.inputs, (o,), (r,), self.first.dropout, False)
                for o, r in zip(self.first.outputs, self.first.ranks, strict=True)]  # fmt: skip

    @property
    def keeps_input(self) -> bool:  # type: ignore[override]
        return bool(self.first.rank)

    def forward(self, t: Tape, n: int, saved: Saved, name: str) -> float:
        xa = 0.0
        made = []
        act = 0.0
        for linear in self._each():
            y, more = linear.forward(t, n)
            xa += sum(t.let_go(more))
            made.append(y)
            if not act:
                act = t.new(n * self.inner)
                if not t.keeps and len(self._each()) > 1:
                    t.free(made.pop())
        product = t.new(n * self.inner)
        if not t.keeps:
            t.free(act, *made)
        y, down_xa = self.down.forward(t, n)
        if not t.keeps:
            t.free(down_xa, product)
            return y
        if not self.down.rank:
            t.free(product)
            product = 0.0
        saved |= {f"{name}.both": sum(made), f"{name}.act": act, f"{name}.product": product, f"{name}.xa": xa,
                  f"{name}.down_xa": down_xa}  # fmt: skip
        return y

    def backward(self, t: Tape, n: int, saved: Saved, name: str) -> float:
        dproduct = self.down.backward(t, n)
        t.free(saved.pop(f"{name}.product"), saved.pop(f"{name}.down_xa"))
        dup, dact = t.new(n * self.inner), t.new(n * self.inner)
        t.free(dproduct, saved.pop(f"{name}.act"))
        both = saved.pop(f"{name}.both")
        each = self._each()
        if len(each) == 1:
            dgate = t.new(n * self.inner)
            t.free(dact)
            whole = t.new(2 * n * self.inner)
            t.free(dgate, dup, both)
            dx = each[0].backward(t, n)
            t.free(whole, saved.pop(f"{name}.xa"))
            return dx
        t.free(both / 2)  # up's output
        dx = each[1].backward(t, n)
        t.free(dup)
        dgate = t.new(n * self.inner)
        t.free(dact, both / 2)
        more = each[0].backward(t, n)
        t.free(dgate, saved.pop(f"{name}.xa"))
        total = t.new(n * self.hidden)
        t.free(dx, more)
        return total
