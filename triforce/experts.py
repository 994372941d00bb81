"""Experts: another MLP, of which each token has its own.

`config` is a `ModelConfig`. Shapes: B batch, M rows of a block, N = B * M rows, E experts, k of them that a row has, F
ffn_dim.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Stack(nn.Module):
    """Matrices of all experts, one below the other: [experts * rows, columns]."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class Experts(nn.Module):
    """A mixture of MLPs, of which a router chooses a few for each token (arXiv 1701.06538; as in Qwen3-MoE).

    A step has static shapes, and a row's bits depend on no choice of other rows. A prefill goes from expert to expert.
    A step reads the experts that its rows have chosen where a device has a product for that, and otherwise all.
    """

    def __init__(self, config):
        super().__init__()
        self.count, self.active, self.weighs_anew = config.num_experts, config.active_experts, config.weighs_anew
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.gate_up = Stack(config.num_experts * 2 * config.ffn_dim, config.dim)
        self.silu = nn.SiLU()
        self.down = Stack(config.num_experts * config.dim, config.ffn_dim)

    def forward(self, x: Tensor, is_prefill: bool = False) -> Tensor:
        rows = x.flatten(0, 1)  # [N, dim]
        shares = self.router(x).flatten(0, 1).softmax(-1, torch.promote_types(x.dtype, torch.float32))  # [N, E]
        weight, chosen = shares.topk(self.active)  # [N, k]
        weight = weight / weight.sum(-1, keepdim=True) if self.weighs_anew else weight
        stacks = [part.weight.unflatten(0, (self.count, -1)) for part in (self.gate_up, self.down)]
        if is_prefill:
            out = self._one_by_one(rows, weight.to(x.dtype), chosen, *stacks)
        elif len(rows) > 1 and has_grouped_product(x.device, x.dtype):
            out = self._grouped(rows, weight, chosen, *stacks)
        elif chosen.numel() < self.count // 4:  # weights that are copied are read and written more than once
            out = self._mlp(rows[:, None, None], *(stack[chosen] for stack in stacks)).squeeze(2)  # [N, k, dim]
            out = (out * weight[..., None]).sum(1)
        else:
            weighed = torch.full_like(shares, -1.0).scatter(1, chosen, weight).t()[..., None]  # [E, N, 1]
            # What was not chosen may have overflowed. A weight may be no number, which has to be seen.
            out = torch.where(weighed == -1, 0.0, self._mlp(rows, *stacks) * weighed).sum(0)
        return out.to(x.dtype).view(x.shape)

    def _mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """x [..., n, dim], weights [..., 2F, dim] and [..., dim, F] -> [..., n, dim]."""
        gate, up = (x @ gate_up.transpose(-1, -2)).chunk(2, -1)
        return (self.silu(gate) * up) @ down.transpose(-1, -2)

    def _grouped(self, rows: Tensor, weight: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Rows in the order of their experts, in one product for all: an expert is read where a row has chosen it."""
        flat, experts = chosen.flatten(), torch.arange(self.count, device=rows.device)
        order, ends = flat.argsort(stable=True), (flat[:, None] <= experts).sum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows[order // self.active], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(self.silu(gate) * up, down.transpose(1, 2), offs=ends)
        y = torch.empty_like(y).index_copy_(0, order, y).view(*chosen.shape, -1)  # [N, k, dim]
        return (y * weight[..., None]).sum(1)

    def _one_by_one(self, rows: Tensor, weight: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Each expert computes its own rows. The host learns how many they are."""
        out, order = torch.zeros_like(rows), chosen.flatten().argsort(stable=True)
        for expert, places in enumerate(order.split(chosen.flatten().bincount(minlength=self.count).tolist())):
            y = self._mlp(rows[None, places // self.active], gate_up[expert], down[expert])[0]
            out.index_add_(0, places // self.active, y * weight.flatten()[places, None])
        return out


@torch.compiler.assume_constant_result
def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU has a kernel for it. Elsewhere PyTorch loops over the experts on the host."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
