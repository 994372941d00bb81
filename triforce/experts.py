"""Experts: many MLPs, of which a router gives each token a few.

`config` is a `ModelConfig`. Shapes: B batch, M rows of a block, N = B * M rows, E experts, k of them that a row has, F
ffn_dim.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LIMIT, SLOPE = 7.0, 1.702  # of the clamped activation


class Stack(nn.Module):
    """Matrices of all experts, one below the other: [experts * rows, columns]."""

    def __init__(self, count: int, rows: int, columns: int, bias: bool):
        super().__init__()
        self.count, self.weight = count, nn.Parameter(torch.empty(count * rows, columns))
        self.bias = nn.Parameter(torch.empty(count * rows)) if bias else None

    def parts(self, chosen: Tensor | int | slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """Weights [E, rows, columns] and biases [E, 1, rows], of those that are chosen."""
        bias = None if self.bias is None else self.bias.view(self.count, 1, -1)[chosen]
        return self.weight.unflatten(0, (self.count, -1))[chosen], bias


class Experts(nn.Module):
    """A mixture of MLPs, of which a router chooses a few for each token (arXiv 1701.06538; as in Qwen3-MoE, gpt-oss).

    A step has static shapes, and a row's bits depend on no choice of other rows. A prefill goes from expert to expert.
    A step reads the experts that its rows have chosen if they are few, or a GPU has a product for them; otherwise all.
    """

    def __init__(self, config):
        super().__init__()
        self.count, self.active, self.weighs_anew = config.num_experts, config.active_experts, config.weighs_anew
        # Grouped products: by `has_grouped_product`, once it is known where the weights lie.
        self.is_clamped, self.is_grouped, bias = config.activation == "clamped", False, config.mlp_bias
        self.router = nn.Linear(config.dim, config.num_experts, bias)
        self.gate_up = Stack(config.num_experts, 2 * config.ffn_dim, config.dim, bias)
        self.silu = nn.SiLU()
        self.down = Stack(config.num_experts, config.dim, config.ffn_dim, bias)

    def forward(self, x: Tensor, is_prefill: bool = False) -> Tensor:
        rows = x.flatten(0, 1)  # [N, dim]
        shares = self.router(x).flatten(0, 1).softmax(-1, torch.promote_types(x.dtype, torch.float32))  # [N, E]
        weight, chosen = shares.topk(self.active, sorted=False)  # [N, k]
        weight = weight / weight.sum(-1, keepdim=True) if self.weighs_anew else weight
        if is_prefill:
            out = self._one_by_one(rows, weight.to(x.dtype), chosen)
        elif self.is_grouped:
            out = self._grouped(rows, weight, chosen)
        elif chosen.numel() < self.count // 4:  # weights that are copied are read and written more than once
            out = (self._mlp(rows[:, None, None], chosen).squeeze(2) * weight[..., None]).sum(1)  # of [N, k, dim]
        else:
            weighed = torch.full_like(shares, -1.0).scatter(1, chosen, weight).t()[..., None]  # [E, N, 1]
            # What was not chosen may have overflowed. A weight may be no number, which has to be seen.
            out = torch.where(weighed == -1, 0.0, self._mlp(rows) * weighed).sum(0)
        return out.to(x.dtype).view(x.shape)

    def _mlp(self, x: Tensor, chosen: Tensor | int | slice = slice(None)) -> Tensor:
        """x [..., n, dim], by experts [...] -> [..., n, dim]."""
        return _linear(self._between(_linear(x, *self.gate_up.parts(chosen))), *self.down.parts(chosen))

    def _between(self, x: Tensor) -> Tensor:
        """[..., 2F] -> [..., F]."""
        gate, up = x.chunk(2, -1)
        if not self.is_clamped:
            return self.silu(gate) * up
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        return self.silu(gate * SLOPE) / SLOPE * up  # the gate times the sigmoid of SLOPE times itself

    def _grouped(self, rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """Rows in the order of their experts, in one product for all: an expert is read where a row has chosen it."""
        flat, experts = chosen.flatten(), torch.arange(self.count, device=rows.device)
        order, ends = flat.argsort(stable=True), (flat[:, None] <= experts).sum(0, dtype=torch.int32)

        def product(x: Tensor, stack: Stack) -> Tensor:
            weights, bias = stack.parts()
            y = F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
            return y if bias is None else y + bias[flat[order], 0]

        y = product(self._between(product(rows[order // self.active], self.gate_up)), self.down)
        y = torch.empty_like(y).index_copy_(0, order, y).view(*chosen.shape, -1)  # [N, k, dim]
        return (y * weight[..., None]).sum(1)

    def _one_by_one(self, rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """Each expert computes its own rows. The host learns how many they are."""
        out, order = torch.zeros_like(rows), chosen.flatten().argsort(stable=True)
        for expert, places in enumerate(order.split(chosen.flatten().bincount(minlength=self.count).tolist())):
            y = self._mlp(rows[None, places // self.active], expert)[0]
            out.index_add_(0, places // self.active, y * weight.flatten()[places, None])
        return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.transpose(-1, -2)
    return y if bias is None else y + bias


def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU has a kernel for it. Elsewhere PyTorch loops over the experts on the host."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
