"""Trains the embedded pair of `triforce`: a 7.5M-parameter target that reads 128K tokens, and a 0.9M draft.

    python benchmarks/tiny_data.py PACKAGES BOOKS .train       # text to tokens, once, on a CPU
    python benchmarks/train_tiny.py --data .train --out OUT    # about nine minutes on one H200
    python benchmarks/train_tiny.py --data .train --out OUT --smoke    # everything once, tiny, on a CPU

First phase: four stages of ever longer sequences for the target, a little unlearning of loops, then the draft is
distilled from it in the regime in which it runs: a few first tokens of the document and a short recent window. Second
phase (`extend`, alone with --start): long texts again, views, loops, and the draft follows.

This file knows nothing of the library that the pair is for: model, caches and measurements are its own, and short.

Shapes: B batch, S sequence, D model width, H heads, V vocabulary.
"""
import argparse
import json
import lzma
import math
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tiny_data import FIRST, MAX_FACTS, REST, make_recall_document
from torch import nn

# ---------------------------------------------------------------------------------------------------------------
# Model

@dataclass
class Config:
    n_layer: int = 8
    dim: int = 256
    n_head: int = 4
    ffn: int = 704
    vocab: int = 4096
    theta: float = 5e6
    max_len: int = 131072
    eps: float = 1e-5


TARGET = Config()
DRAFT = Config(n_layer=2, dim=128, n_head=2, ffn=352, theta=10000.0, max_len=2048)


@dataclass
class Stage:
    length: int
    batch: int
    tokens: float
    seconds: float  # expected, only to spread the learning rate over the stages
    fact_share: float  # of the sequences
    lines: tuple  # fact lines in such a sequence, from and to
    value_weight: float
    random_share: float = 0.0  # of those sequences: lines of any tokens instead of facts
    value_target: float = 0.0  # share of values that must be right at its end


# The first stage is short sequences full of facts: it settles the copying circuit that the weights start with.
STAGES = [
    Stage(256, 256, 30e6, 12, 1.0, (4, 20), 3.0, 0.2, 0.6),
    Stage(2048, 64, 330e6, 125, 0.25, (24, 80), 3.0),
    Stage(16384, 8, 70e6, 55, 0.5, (32, 128), 6.0),
    Stage(131072, 1, 12e6, 52, 0.7, (64, 200), 20.0),
]


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight.to(x.dtype)


def rotate(x, cos, sin):
    """Rotary embedding in the half-split convention. x [B, H, S, 64], cos and sin [..., S, 64]."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def causal(layer, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head = c.n_head
        self.norm1, self.norm2 = RMSNorm(c.dim, c.eps), RMSNorm(c.dim, c.eps)
        def linear(i, o):
            return nn.Linear(i, o, bias=False)
        self.q, self.k, self.v, self.o = (linear(c.dim, c.dim) for _ in range(4))
        self.gate, self.up, self.down = linear(c.dim, c.ffn), linear(c.dim, c.ffn), linear(c.ffn, c.dim)

    def forward(self, x, cos, sin, layer=0, attend=causal):  # [B, S, D]
        B, S, D = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(B, S, self.n_head, -1).transpose(1, 2) for p in (self.q, self.k, self.v))  # [B, H, S, 64]
        out = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.o(out.transpose(1, 2).reshape(B, S, D))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = RMSNorm(c.dim, c.eps)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.05 if "embed" in name else c.dim ** -0.5)
                if name.endswith(("o.weight", "down.weight")):
                    nn.init.zeros_(p)
        dim = c.dim // c.n_head
        self.freqs = c.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def rope(self, positions):
        angle = positions.float()[..., None] * self.freqs.to(positions.device)  # [..., S, 32]
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    def forward(self, tokens, positions=None, attend=causal):  # [B, S] -> [B, S, D]: hidden states before the head
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.embed(tokens).to(compute_dtype(tokens.device))
        cos, sin = self.rope(positions)  # fp32: positions go up to 131072
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]  # [B, 1, S, 64]
        for layer, block in enumerate(self.blocks):
            # only the causal pass is compiled; `forward` goes round the compiled call
            x = block(x, cos, sin) if attend is causal else block.forward(x, cos, sin, layer, attend)
        return self.norm(x)

    def logits(self, hidden):
        return F.linear(hidden, self.embed.weight.to(hidden.dtype)).float()


def compute_dtype(device):
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def autocast(device):
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


@torch.no_grad()
def seed_induction(model):
    """Starts from a copying circuit instead of waiting for one: by itself it did not appear within 137M tokens.

    Head 0 of layer 0 looks at the previous token and writes what it was into spare channels; head 0 of layer 1 looks
    for a token whose predecessor is the current token, and copies it. Only a start: training moves all of it.
    """
    c, dim = model.c, model.c.dim // model.c.n_head  # dim of a head
    pairs, n = dim // 2, min(64, 3 * c.dim // 8)
    content, spare = torch.arange(1, n + 1), torch.arange(c.dim - n, c.dim)
    model.embed.weight[:, 0] = 0.4  # a constant: about 7 after the norm
    model.embed.weight[:, spare] = 0
    a, b = model.blocks[0], model.blocks[1]
    for block in (a, b):
        for w in (block.q, block.k, block.v):
            w.weight[:dim] = 0
    # scores sum_j s_j^2 cos((distance - 1) f_j): highest at the previous token
    for j, strength in enumerate((1.7, 1.4, 1.0, 1.0, 0.7, 0.7)):
        f = model.freqs[j].item()
        a.q.weight[j, 0] = 0.6 * strength
        a.k.weight[j, 0], a.k.weight[j + pairs, 0] = 0.6 * strength * math.cos(f), 0.6 * strength * math.sin(f)
    a.v.weight[torch.arange(n), content] = 1
    a.o.weight[spare, torch.arange(n)] = 0.11
    # content is compared in the slowly rotating half of the pairs, which mean the same at any distance
    slow = torch.cat((torch.arange(pairs // 2, pairs), torch.arange(pairs + pairs // 2, dim)))
    m = min(len(slow), n)
    b.q.weight[slow[:m], content[:m]] = 2.5
    b.k.weight[slow[:m], spare[:m]] = 2.5
    b.v.weight[torch.arange(n), content] = 1
    b.o.weight[content, torch.arange(n)] = 0.75


# ---------------------------------------------------------------------------------------------------------------
# Optimizer: Muon for the matrices inside the blocks, Adam for the rest

def orthogonalize(g):  # [n, rows, cols]: Newton-Schulz, all matrices of one shape at once
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.mT if tall else x


class Muon:
    def __init__(self, model, lr, adam_lr, compile):
        matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
        shapes = sorted({tuple(p.shape) for p in matrices})
        self.groups = [[p for p in matrices if tuple(p.shape) == shape] for shape in shapes]
        self.momentum = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.lr, self.adam_lr = lr, adam_lr
        self.ortho = torch.compile(orthogonalize) if compile else orthogonalize

    @torch.no_grad()
    def step(self, scale):
        for group, m in zip(self.groups, self.momentum, strict=False):
            g = torch.stack([p.grad for p in group])
            m.lerp_(g, 0.05)
            update = self.ortho(g.lerp(m, 0.95)).float()
            lr = self.lr * scale * max(1, m.shape[1] / m.shape[2]) ** 0.5
            torch._foreach_mul_(group, 1 - 0.05 * self.lr * scale)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr)
        for g in self.adam.param_groups:
            g["lr"] = self.adam_lr * scale
        self.adam.step()
        for group in self.groups:
            for p in group:
                p.grad = None
        self.adam.zero_grad()


# ---------------------------------------------------------------------------------------------------------------
# Data: tokens live on the device; facts are written into the sequences there, many rows at once

def load_tokens(path, name):
    raw = np.frombuffer(lzma.decompress(Path(path, f"{name}.xz").read_bytes()), np.uint8)
    tokens = np.ascontiguousarray(raw.reshape(2, -1).T).view(np.uint16).ravel()
    return tokens, np.load(Path(path, f"{name}_ends.npy"))


class Data:
    BOS, VALUE = 1, slice(6, 9)

    def __init__(self, path, sp, device, books_share=0.6):
        self.device, self.share, self.vocab = device, books_share, sp.vocab_size()
        self.parts = []
        for name in ("books", "docs"):
            tokens, ends = load_tokens(path, name)
            self.parts.append((torch.from_numpy(tokens.astype(np.int16)).to(device), torch.from_numpy(ends).to(device)))
        line = sp.encode(f"\nRemember: {FIRST[0]}{REST[0]}{REST[1]} {FIRST[1]}{REST[2]}{REST[3]}.\n")
        assert len(line) == 11, sp.encode(line, out_type=str)
        self.line = torch.tensor(line, device=device)
        self.first = torch.tensor([sp.encode(" " + s)[0] for s in FIRST], device=device)
        self.rest = torch.tensor([sp.piece_to_id(s) for s in REST], device=device)
        # weights of a line's tokens when it is new (names are noise) and when it is a repeat (all but its place and
        # its first syllable follow): \n Remember : k k k v v v . \n
        self.new = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], device=device, dtype=torch.float32)
        self.old = torch.tensor([0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1], device=device, dtype=torch.float32)

    def text(self, part, n, length):
        """n windows of one corpus, inside one document where it is long enough."""
        tokens, ends = self.parts[part]
        at = torch.randint(len(tokens) - length, (n,), device=self.device)
        doc = torch.searchsorted(ends, at, right=True)
        begin = torch.where(doc > 0, ends[(doc - 1).clamp_min(0)], 0)
        return torch.minimum(at, (ends[doc] - length).clamp_min(begin)).clamp_max(len(tokens) - length), tokens

    def batch(self, n, length, with_facts, lines=(32, 80), value_weight=1.0, random_lines=0):
        """tokens [n, length + 1], weights [n, length] of the targets, repeats: (rows, positions) of known values."""
        d = self.device
        is_fact = torch.zeros(n, length + 1, dtype=torch.bool, device=d)
        weight = torch.ones(n, length + 1, device=d)
        seq = torch.zeros(n, length + 1, dtype=torch.long, device=d)
        values = torch.zeros_like(is_fact)
        if with_facts:
            K = int(torch.randint(lines[0], min(lines[1], (length - 1) // 12) + 1, ()))
            asked_later = bool(torch.rand(()) < 0.5)  # all facts first, then all questions; otherwise any order
            if asked_later:
                facts = min(K // 2, MAX_FACTS)
                def order():
                    return torch.rand(with_facts, facts, device=d).argsort(1)
                ids = torch.cat([order()] + [order() for _ in range(math.ceil(K / facts) - 1)], 1)[:, :K]
            else:
                facts = int(torch.randint(min(4, K // 2), min(K // 2, MAX_FACTS) + 1, ()))
                ids = torch.randint(facts, (with_facts, K), device=d)
            first = self.first[torch.rand(with_facts, len(FIRST), device=d).argsort(1)[:, : 2 * facts]].view(
                -1, facts, 2, 1
            )
            rest = self.rest[torch.rand(with_facts, len(REST), device=d).argsort(1)[:, : 4 * facts]].view(
                -1, facts, 2, 2
            )
            names = torch.cat((first, rest), -1).view(-1, facts, 6)
            content = self.line.repeat(with_facts, K, 1)  # [n, K, 11]
            content[:, :, 3:9] = names.gather(1, ids[..., None].expand(-1, -1, 6))
            same = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)  # [n, K]: said before
            line_weight = torch.where(same[..., None], self.old, self.new)
            line_weight[:, :, self.VALUE] *= value_weight
            if random_lines:  # in so many rows the lines are any eleven tokens: repeats of all kinds teach induction
                table = torch.randint(3, self.vocab, (random_lines, facts, 11), device=d)
                content[-random_lines:] = table.gather(1, ids[-random_lines:, :, None].expand(-1, -1, 11))
                line_weight[-random_lines:] = same[-random_lines:, :, None] * (torch.arange(11, device=d) > 0)
            is_value = torch.zeros(11, dtype=torch.bool, device=d)
            is_value[self.VALUE] = True
            start = torch.randint(1, length - 11 * K, (with_facts, K), device=d).sort(1).values
            start += torch.arange(K, device=d) * 11
            at = (start[..., None] + torch.arange(11, device=d)).flatten(1)  # [n, K * 11]
            seq[:with_facts].scatter_(1, at, content.flatten(1))
            weight[:with_facts].scatter_(1, at, line_weight.flatten(1))
            is_fact[:with_facts].scatter_(1, at, True)
            known = same[..., None] & is_value
            known[with_facts - random_lines:] = False
            values[:with_facts].scatter_(1, at, known.flatten(1))
        from_books = torch.rand(n, device=d) < self.share
        read = (~is_fact).long().cumsum(1) - 1  # [n, S + 1]: how many tokens of text were read before
        for part in (0, 1):
            at, tokens = self.text(part, n, length + 1)
            text = tokens[at[:, None] + read].long()
            seq = torch.where(is_fact | (from_books != (part == 0))[:, None], seq, text)
        seq[:, 0] = self.BOS
        return seq, weight[:, 1:], values[:, 1:]


# ---------------------------------------------------------------------------------------------------------------
# Training

def weighted_loss(hidden, head, targets, weight):
    loss = F.cross_entropy((hidden @ head.T).float(), targets, reduction="none")
    return (loss * weight).sum() / weight.sum()


def train_target(c, data, stages, device, seed, compile, unloop_rounds):
    torch.manual_seed(seed)
    model = Transformer(c)
    seed_induction(model)
    model.to(device)
    optimizer = Muon(model, 0.01, 2e-3, compile)
    loss_fn = torch.compile(weighted_loss, dynamic=False) if compile else weighted_loss
    if compile:
        for block in model.blocks:  # one block, compiled once a length, instead of the whole model
            block.compile(dynamic=False)
    total, before, step, recent, t0 = sum(s.seconds for s in stages), 0.0, 0, 0.0, time.time()
    for stage in stages:
        steps = max(1, int(stage.tokens / stage.batch / stage.length))
        for i in range(steps):
            progress = (before + stage.seconds * i / steps) / total
            scale = min(1, (step + 1) / 300) * min(1, (1 - progress) / 0.7)
            rows = stage.batch * stage.fact_share
            rows = int(rows) + int(torch.rand(()) < rows - int(rows))
            tokens, weight, values = data.batch(
                stage.batch, stage.length, rows, stage.lines, stage.value_weight, int(rows * stage.random_share)
            )
            with autocast(device):
                hidden = model(tokens[:, :-1])
                head = model.embed.weight.to(hidden.dtype)
                loss = loss_fn(hidden.flatten(0, 1), head, tokens[:, 1:].flatten(), weight.flatten())
            loss.backward()
            optimizer.step(scale)
            step += 1
            if i % max(1, steps // 20) == 0 or i == steps - 1:
                right = model.logits(hidden[values].detach()).argmax(-1) == tokens[:, 1:][values]
                recent = right.float().mean().item() if rows else recent
                print(f"length {stage.length} step {i}/{steps} loss {loss.item():.3f} values {recent:.3f} "
                      f"lr {scale:.3f} {time.time() - t0:.0f} s", flush=True)
        before += stage.seconds
        if stage.value_target and recent < stage.value_target:
            raise SystemExit(
                f"values {recent:.3f} below {stage.value_target} after the first stage: not worth going on"
            )
    unloop(model, optimizer, loss_fn, data, device, unloop_rounds, stages[1].batch, stages[1].length,
           new_tokens=min(256, stages[1].length // 8))
    return model.eval()


def unlikelihood(model, tokens, new_tokens):
    """Mean over the sampled tokens of -log(1 - p), counted where a token repeats eight earlier sampled ones."""
    new = tokens[:, -new_tokens:]
    hidden = model(tokens[:, :-1])[:, -new_tokens:]
    again = repeats(new)
    p = model.logits(hidden[again]).softmax(-1).gather(1, new[again][:, None])
    return -torch.log1p(-p.clamp_max(0.999)).sum() / new.numel(), again.float().mean()


def unloop(model, optimizer, loss_fn, data, device, rounds, rows=64, length=2048, new_tokens=256, scale=0.1, sets=4):
    """A model this small falls into loops when it samples. It samples, and unlearns the repeats (Welleck et al.,
    "Neural text generation with unlikelihood training", 2019), beside ordinary batches."""
    for i in range(rounds):
        prompts = torch.cat([data.batch(rows, length - new_tokens - 1, 0)[0] for _ in range(sets)])
        written = torch.cat((prompts, sample(model, prompts, new_tokens, seed=i)), 1)
        for part in written.split(rows):
            tokens, weight, _ = data.batch(rows, length, rows // 4, value_weight=3.0, lines=(16, length // 24))
            with autocast(device):
                hidden = model(tokens[:, :-1])
                head = model.embed.weight.to(hidden.dtype)
                loss = loss_fn(hidden.flatten(0, 1), head, tokens[:, 1:].flatten(), weight.flatten())
                again, share = unlikelihood(model, part, new_tokens)
            (loss + 4 * again).backward()
            optimizer.step(scale * (1 - i / rounds))
        print(f"unloop {i}/{rounds} loss {loss.item():.3f} repeated {share.item():.3f}", flush=True)


TEMPERATURES = (1.0, 0.6)  # at which views and drafts are to agree with the full cache


def view_loss(model, tokens, blocks, size, budget, recent):
    """One minus the expected acceptance of blocks read through a retrieval view, against the full cache (constant);
    the mean of that at the two temperatures."""
    with torch.no_grad():
        full = Recorded()
        hidden = model(tokens, attend=full)[0]  # [S, D]
    starts = torch.randint(budget + recent, tokens.shape[1] - size, (blocks,), device=tokens.device)
    at = starts[:, None] + torch.arange(size, device=tokens.device)
    view = view_hidden(model, full, tokens, starts, size, budget, recent)
    exact, seen = model.logits(hidden[at]), model.logits(view)
    return 1 - sum(acceptance(exact, seen, temperature).mean() for temperature in TEMPERATURES) / len(TEMPERATURES)


def extend(model, data, device, seed, compile, steps, length, middle, rows=8, new_tokens=256, every=8, budget=4096,
           blocks=24, size=64, peak=0.5, seconds=190, sharpen=1.1, view_weight=1.0, loop_weight=6.0):
    """The second phase. Every step: one long text; several of a middle length; blocks of `size` tokens that read one of
    these through a retrieval view, chosen at the block's beginning, as in decoding; from a quarter on, texts that the
    model has continued itself, to unlearn loops."""
    torch.manual_seed(seed + 2)
    with torch.no_grad():  # attention spreads over more tokens the longer the text
        for block in model.blocks:
            block.q.weight *= sharpen
    optimizer = Muon(model, 0.01, 2e-3, compile)
    loss_fn = torch.compile(weighted_loss, dynamic=False) if compile else weighted_loss
    if compile:
        for block in model.blocks:
            block.compile(dynamic=False)

    def backward(n, size, facts, lines, value_weight, share):
        tokens, weight, values = data.batch(n, size, facts, lines, value_weight)
        with autocast(device):
            hidden = model(tokens[:, :-1])
            head = model.embed.weight.to(hidden.dtype)
            loss = loss_fn(hidden.flatten(0, 1), head, tokens[:, 1:].flatten(), weight.flatten())
        (share * loss).backward()
        with torch.no_grad():
            right = (model.logits(hidden[values]).argmax(-1) == tokens[:, 1:][values]).float().mean().item()
        return tokens, loss.item(), right

    parts, t0, again, share, seen = [], time.time(), torch.zeros(()), torch.zeros(()), [0.0, 0.0]
    for i in range(steps):
        progress = max(i / steps, (time.time() - t0) / seconds)  # a slow machine takes fewer steps
        if progress >= 1:
            break
        scale = peak * min(1, (i + 1) / 15) * min(1, (1 - progress) / 0.7)
        tokens, loss, right = backward(1, length, int(torch.rand(()) < 0.7), (24, min(150, length // 24)), 20.0, 1.0)
        nearer, near, near_right = backward(rows, middle, rows // 2, (16, min(128, middle // 24)), 6.0, 0.5)
        read, held = (tokens, budget) if i % 2 == 0 else (nearer[i % rows, None], budget // (4 if i % 4 == 1 else 8))
        with autocast(device):
            view = view_loss(model, read[:, :-1], blocks, size, held, held // 4)
        (view_weight * view).backward()
        seen[i % 2] = 1 - view.item()
        if progress >= 0.4:
            if not parts:
                kept, data.share = data.share, 0.3  # documentation loops more
                prompts = data.batch(4 * rows * every, middle // 8 - new_tokens, 0)[0]
                data.share = kept
                parts = list(torch.cat((prompts, sample(model, prompts, new_tokens, seed=1000 + i)), 1).split(4 * rows))
            with autocast(device):
                again, share = unlikelihood(model, parts.pop(), new_tokens)
            (loop_weight * again).backward()
        optimizer.step(scale)
        if i % 4 == 0 or i == steps - 1:
            print(
                f"extend {i}/{steps} loss {loss:.3f} values {right:.3f}, {middle}: {near:.3f} {near_right:.3f}, views "
                f"{seen[0]:.3f} {seen[1]:.3f} repeated {share.item():.3f} lr {scale:.3f} {time.time() - t0:.0f} s",
                flush=True,
            )
    return model.eval()


def distil_loss(student, head, teacher, teacher_head, keep, mix):
    """Kullback-Leibler divergence, then (mix = 1) total variation: one minus the expected acceptance, the mean of that
    at the two temperatures."""
    q_log = (student @ head.T).float().log_softmax(-1)
    p_log = (teacher @ teacher_head.T).float().log_softmax(-1)
    p = p_log.exp()
    kl = (p * (p_log - q_log)).sum(-1)
    tv = sum(0.5 * ((p_log / t).softmax(-1) - (q_log / t).softmax(-1)).abs().sum(-1) for t in TEMPERATURES)
    tv = tv / len(TEMPERATURES)
    scale = keep / keep.sum()
    return ((1 - mix) * kl + 2 * mix * tv).mul(scale).sum(), (tv * scale).sum()


def train_draft(c, target, data, device, seed, tokens, compile, length=16384, window=512, batch=4, start=None):
    """The draft sees 4 first tokens and a short window; the target, whose law it learns, has seen everything."""
    torch.manual_seed(seed + 1)
    model = start or Transformer(c).to(device)
    optimizer = Muon(model, 0.02 if start is None else 0.006, 3e-3 if start is None else 1e-3, compile)
    loss_fn = torch.compile(distil_loss, dynamic=False) if compile else distil_loss
    if compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    n = (length - 4) // (window - 4)  # windows a sequence
    used = n * (window - 4)
    steps = max(1, int(tokens / (batch * length)))
    keep = (torch.arange(window - 4, device=device) >= 64).float().repeat(batch * n)
    t0, mix = time.time(), torch.zeros((), device=device)
    for i in range(steps):
        seq, _, _ = data.batch(batch, length, 1 if i % 4 == 0 else 0)
        seq = seq[:, :-1]
        with torch.no_grad(), autocast(device):
            teacher = target(seq)[:, 4:4 + used].reshape(-1, target.c.dim)
        windows = torch.cat((seq[:, None, :4].expand(-1, n, -1), seq[:, 4 : 4 + used].view(batch, n, -1)), -1).flatten(
            0, 1
        )
        mix.fill_(min(1.0, max(0.0, (i / steps - 0.4) / 0.2)) if start is None else 1.0)
        with autocast(device):
            student = model(windows)[:, 4:].reshape(-1, c.dim)
            loss, tv = loss_fn(student, model.embed.weight.to(student.dtype), teacher,
                               target.embed.weight.to(teacher.dtype), keep, mix)
        loss.backward()
        optimizer.step(min(1, (i + 1) / 100) * min(1, (1 - i / steps) / 0.7))
        if i % max(1, steps // 10) == 0 or i == steps - 1:
            print(
                f"draft step {i}/{steps} loss {loss.item():.3f} acceptance {1 - tv.item():.3f} "
                f"{time.time() - t0:.0f} s",
                flush=True,
            )
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------
# Measuring, all on held-out text and with the weights as they are published (rounded to bf16)

class Recorded:
    """Causal attention that keeps queries, keys and values of every layer: the full cache."""

    def __init__(self):
        self.q, self.k, self.v = [], [], []

    def __call__(self, layer, q, k, v):
        for store, x in ((self.q, q), (self.k, k), (self.v, v)):
            store.append(x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def view_hidden(model, full, tokens, starts, size, budget, recent, chunk=8, query_at=-1):
    """Hidden states of blocks of `size` tokens read through a small view of one sequence's full cache.

    The view of a block starting at s: the first chunk, the `recent` tokens before s, and the chunks whose mean key
    agrees best with the query of the token at s + query_at (per layer and head). What the block itself adds comes
    from this same pass. With recent = budget - chunk nothing is selected: a StreamingLLM cache.
    """
    d, starts = tokens.device, torch.as_tensor(starts, device=tokens.device)
    inside = torch.arange(size, device=d)
    top = (budget - chunk - recent) // chunk
    mask = torch.ones(size, chunk + recent + top * chunk + size, dtype=torch.bool, device=d)
    mask[:, -size:] = mask[:, -size:].tril()

    def attend(layer, q, k, v):  # [N, H, size, 64]
        K, V, Q = full.k[layer][0], full.v[layer][0], full.q[layer][0]  # [H, S, 64]
        H, N = K.shape[0], len(starts)
        n_chunk = K.shape[1] // chunk
        index = torch.cat(
            (torch.arange(chunk, device=d).expand(N, -1), starts[:, None] - recent + torch.arange(recent, device=d)), 1
        )
        index = index[:, None].expand(-1, H, -1)
        if top:
            means = K[:, :n_chunk * chunk].unflatten(1, (n_chunk, chunk)).float().mean(2)  # [H, C, 64]
            scores = torch.einsum("hnd,hcd->nhc", Q[:, starts + query_at].float(), means)
            c = torch.arange(n_chunk, device=d)
            outside = (c == 0) | ((c + 1) * chunk > starts[:, None] - recent)  # [N, C]
            best = scores.masked_fill(outside[:, None], -torch.inf).topk(top, -1).indices  # [N, H, top]
            index = torch.cat((index, (best[..., None] * chunk + torch.arange(chunk, device=d)).flatten(2)), -1)
        heads = torch.arange(H, device=d)[None, :, None]
        keys, vals = torch.cat((K[heads, index], k), 2), torch.cat((V[heads, index], v), 2)
        return F.scaled_dot_product_attention(q, keys, vals, attn_mask=mask)

    at = starts[:, None] + inside  # [N, size]
    return model(tokens[0][at], at, attend)


def acceptance(a, b, temperature=1.0, top_p=1.0):
    """Expected acceptance: sum over the vocabulary of min of the two laws."""
    return torch.minimum(law(a, temperature, top_p), law(b, temperature, top_p)).sum(-1)


def law(logits, temperature, top_p):
    probs = (logits / temperature).softmax(-1)
    if top_p < 1:
        sorted_probs, order = probs.sort(-1, descending=True)
        drop = sorted_probs.cumsum(-1) - sorted_probs >= top_p
        probs = probs.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


@torch.no_grad()
def long_context(target, draft, tokens, device, length, window=256, measured=1024, budget=4096, recent=1024):
    """One stretch of text: loss with the whole context and with 2K of it, acceptance of the views and of the draft."""
    tokens = torch.tensor([[1, *tokens[:length]]], device=device)  # [1, length + 1]
    full = Recorded()
    hidden = target(tokens[:, :-1], attend=full)[0]
    out, S = {}, length
    logits = target.logits(hidden[S - 2 * measured:])
    truth = tokens[0, S - 2 * measured + 1:]
    out["loss_full"] = F.cross_entropy(logits, truth).item()
    short, step = min(2048, length // 2), 256  # windows of 2048 ending at successive places: their last 256 tokens
    ends = [S - 2 * measured + step * (i + 1) for i in range(2 * measured // step)]
    rows = torch.stack([torch.cat((tokens[0, :1], tokens[0, e - short + 1:e])) for e in ends])
    out["loss_2k"] = F.cross_entropy(target.logits(target(rows)[:, -step:]).flatten(0, 1), truth).item()

    truth_logits, size = target.logits(hidden[S - measured:]), 16
    starts = list(range(S - measured, S, size))
    for name, r in (("retrieval", recent), ("streaming", budget - 8)):
        h = torch.cat(
            [view_hidden(target, full, tokens, starts[i : i + 16], size, budget, r) for i in range(0, len(starts), 16)]
        )
        view = target.logits(h.flatten(0, 1))
        out[name] = acceptance(truth_logits, view).mean().item()
        out[name + "_t06"] = acceptance(truth_logits, view, 0.6, 0.9).mean().item()
    index = torch.arange(S - measured, S, device=device)[:, None] + torch.arange(-window + 1, 1, device=device)
    rows = torch.cat((tokens[:, :4].expand(measured, -1), tokens[0][index]), 1)  # [measured, 4 + window]
    view = torch.cat([draft.logits(draft(r)[:, -1]) for r in rows.split(256)])
    out["draft"] = acceptance(truth_logits, view).mean().item()
    out["draft_t06"] = acceptance(truth_logits, view, 0.6, 0.9).mean().item()
    return out


@torch.no_grad()
def recall(target, sp, book, device, length, depths, trials, seed, budget=512, views=True):
    """Share of questions whose whole answer is the likeliest at every token; acceptance of views on the answers."""
    rng = np.random.default_rng(seed)
    right, token_right, scores = [], [], {"retrieval": [], "streaming": []}
    for depth in np.linspace(0, 1, depths):
        for _ in range(trials):
            prompt, answer = make_recall_document(rng, sp.encode, book, length, float(depth))
            tokens = torch.tensor([prompt + answer], device=device)
            full = Recorded()
            P, A = len(prompt), len(answer)
            logits = target.logits(target(tokens[:, :-1], attend=full)[0, P - 1:])  # [A, V]
            hit = (logits.argmax(-1) == tokens[0, P:]).cpu()
            right.append(hit.all().item())
            token_right.append(hit.float().mean().item())
            if views:
                for name, recent in (("retrieval", budget // 4), ("streaming", budget - 8)):
                    h = view_hidden(target, full, tokens, [P - 1], A, budget, recent, query_at=0)
                    scores[name].append(acceptance(logits, target.logits(h[0])).mean().item())
    by_depth = np.reshape(right, (depths, trials)).mean(1).round(2).tolist()
    out = {
        "exact": float(np.mean(right)),
        "tokens": float(np.mean(token_right)),
        "questions": len(right),
        "by_depth": by_depth,
    }
    return out | {f"{k}_{budget}": float(np.mean(v)) for k, v in scores.items() if v}


@torch.no_grad()
def sample(model, prompts, new_tokens, temperature=0.6, top_p=0.9, seed=0):
    """One continuation a row: prompts [B, S] -> token ids [B, new_tokens]."""
    full, (B, S), d = Recorded(), prompts.shape, prompts.device
    with autocast(d.type):
        logits = model.logits(model(prompts, attend=full)[:, -1])  # [B, V]
        keys, vals = ([torch.cat((x, x.new_zeros(B, x.shape[1], new_tokens, x.shape[3])), 2) for x in store]
                      for store in (full.k, full.v))
        generator, out = torch.Generator(d).manual_seed(seed), []
        for n in range(S, S + new_tokens):
            out.append(torch.multinomial(law(logits, temperature, top_p), 1, generator=generator))

            def attend(layer, q, k, v, n=n):
                keys[layer][:, :, n:n + 1], vals[layer][:, :, n:n + 1] = k, v
                return F.scaled_dot_product_attention(q, keys[layer][:, :, :n + 1], vals[layer][:, :, :n + 1])

            logits = model.logits(model(out[-1], torch.tensor([n], device=d), attend)[:, 0])
    return torch.cat(out, 1)


def repeats(tokens, n=8):
    """[B, S] -> bool [B, S]: does this token complete n tokens that were there before?"""
    grams = tokens.unfold(1, n, 1)  # [B, S - n + 1, n]
    base = torch.tensor([4099 ** i % (1 << 31) for i in range(n)], device=tokens.device)
    key = (grams * base).sum(-1)
    before = (key[:, :, None] == key[:, None, :]).tril(-1).any(-1)
    return F.pad(before, (n - 1, 0))


def most_repeated(ids, n=8):
    return max(Counter(tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)).values())


def evaluate(target, draft, path, sp, device, smoke=False):
    target, draft = (m.bfloat16() if device == "cuda" else m for m in (target, draft))
    length, short, trials = (122880, 16384, 20) if not smoke else (6144, 1024, 1)
    figures, t0 = {"long_context": []}, time.time()
    books, ends = load_tokens(path, "heldout_books")
    begins = [0, *ends[:-1]]
    for book, (a, b) in enumerate(zip(begins, ends, strict=False)):
        for start in (a, b - length) if not smoke else (a,):
            figures["long_context"].append({"book": book, "start": int(start - a)} | long_context(
                target, draft, books[start:start + length].tolist(), device, length))
    docs, _ = load_tokens(path, "heldout_docs")
    prompt, _ = load_tokens(path, "default_prompt")
    for name, tokens in (("documentation", docs), ("default prompt", prompt)):
        figures["long_context"].append(
            {"book": name} | long_context(target, draft, tokens[:length].tolist(), device, length)
        )
    for row in figures["long_context"]:
        print(json.dumps(row), flush=True)
    figures["books_mean"] = {k: float(np.mean([r[k] for r in figures["long_context"] if r["book"] in (0, 1, 2)]))
                             for k in figures["long_context"][0] if k not in ("book", "start")}
    print("books", json.dumps(figures["books_mean"]), f"{time.time() - t0:.0f} s", flush=True)
    book = sp.decode(books.tolist())
    figures["recall_short"] = recall(target, sp, book, device, short, 10, trials, seed=1)
    print("recall", short, json.dumps(figures["recall_short"]), f"{time.time() - t0:.0f} s", flush=True)
    if not smoke:
        figures["recall_64k"] = recall(target, sp, book, device, 65536, 10, 2, seed=4, budget=1024)
        figures["recall_long"] = recall(target, sp, book, device, length, 10, 5, seed=3, budget=4096)
        for k in ("recall_64k", "recall_long"):
            print(k, json.dumps(figures[k]), flush=True)
    rows = torch.tensor([[1, *prompt[:short - 1].tolist()]], device=device).expand(16 if not smoke else 2, -1)
    rows = sample(target, rows, 256 if not smoke else 16).tolist()
    figures["most_repeated_8gram"] = [most_repeated(r) for r in rows]
    print("most repeated 8-gram of each sample", figures["most_repeated_8gram"], f"{time.time() - t0:.0f} s")
    figures["samples"] = [sp.decode(r) for r in rows]
    print("\n--------\n".join(figures["samples"][:3]))
    return figures


# ---------------------------------------------------------------------------------------------------------------
# Hugging Face folders

def hf_config(c):
    return {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": c.dim // c.n_head, "hidden_act": "silu", "hidden_size": c.dim,
        "initializer_range": 0.02, "intermediate_size": c.ffn, "max_position_embeddings": c.max_len, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": c.n_head, "num_hidden_layers": c.n_layer,
        "num_key_value_heads": c.n_head, "pretraining_tp": 1, "rms_norm_eps": c.eps, "rope_scaling": None,
        "rope_theta": c.theta, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": c.vocab}


HF_TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "add_prefix_space": False,
    "legacy": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None,
    "clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False, "sp_model_kwargs": {},
    "use_default_system_prompt": False}

HF_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hf_name(name):
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    if name == "norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}.weight"


def write_folder(folder, c, tokenizer_file, model=None):
    from safetensors.torch import save_file
    folder.mkdir(parents=True, exist_ok=True)
    def write(name, x):
        return (folder / name).write_text(json.dumps(x, indent=2) + "\n")
    write("config.json", hf_config(c))
    write(
        "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
    )
    write("tokenizer_config.json", HF_TOKENIZER | {"model_max_length": c.max_len})
    (folder / "tokenizer.model").write_bytes(Path(tokenizer_file).read_bytes())
    if model is not None:
        tensors = {hf_name(n.replace("_orig_mod.", "")): p.detach().to("cpu", torch.bfloat16).contiguous()
                   for n, p in model.named_parameters()}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def read_folder(folder, c, device):
    from safetensors.torch import load_file
    model, tensors = Transformer(c), load_file(folder / "model.safetensors")
    model.load_state_dict({n: tensors[hf_name(n)].float() for n, _ in model.named_parameters()})
    return model.to(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=".train")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the tokens of every stage")
    parser.add_argument("--draft-tokens", type=float, default=80e6)
    parser.add_argument("--extend-steps", type=int, default=130)
    parser.add_argument("--extend-draft-tokens", type=float, default=10e6)
    parser.add_argument("--sharpen", type=float, default=1.1, help="factor of all queries as the second phase begins")
    parser.add_argument("--view-weight", type=float, default=1.0, help="of agreement with views, in the second phase")
    parser.add_argument("--loop-weight", type=float, default=6.0, help="of unlearning repeats, in the second phase")
    parser.add_argument("--start", help="folder of the first phase's pair: does only the second")
    parser.add_argument("--average", action="store_true", help="ends with the mean of its weights and those of --start")
    parser.add_argument("--books-share", type=float, default=0.6)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny configuration, on any device")
    args = parser.parse_args()
    import sentencepiece as spm
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer_file = Path(args.data, "tokenizer.model")
    sp = spm.SentencePieceProcessor(model_file=str(tokenizer_file))
    data = Data(args.data, sp, device, args.books_share)
    out, target_config, draft_config = Path(args.out), TARGET, DRAFT
    stages = [replace(s, tokens=s.tokens * args.scale) for s in STAGES]
    draft_tokens, length, compile = args.draft_tokens * args.scale, 16384, device == "cuda"
    if args.smoke:
        target_config, draft_config = (
            replace(TARGET, n_layer=2, dim=64, n_head=1, ffn=96),
            replace(DRAFT, dim=64, n_head=1, ffn=96),
        )
        stages = [replace(s, length=size, batch=2, tokens=4 * size, lines=(4, 8), value_target=0)
                  for s, size in zip(STAGES, (256, 512, 1024, 2048), strict=False)]
        draft_tokens, length = 8 * 1024, 1024
    torch.set_float32_matmul_precision("high")
    t0 = time.time()
    first = Path(args.start) if args.start else out / "first"
    if not args.start:
        target = train_target(target_config, data, stages, device, args.seed, compile, 20 if not args.smoke else 1)
        write_folder(first / "target", target_config, tokenizer_file, target)
        draft = train_draft(draft_config, target, data, device, args.seed, draft_tokens, compile, length)
        write_folder(first / "draft", draft_config, tokenizer_file, draft)
        torch._dynamo.reset()
    target, draft = (
        read_folder(first / "target", target_config, device),
        read_folder(first / "draft", draft_config, device),
    )
    small = {"length": 131072, "middle": 16384} if not args.smoke else {
        "length": 2048, "middle": 512, "new_tokens": 16, "every": 1, "seconds": 1e9, "budget": 256, "blocks": 2,
        "size": 16}
    target = extend(target, data, device, args.seed, compile, args.extend_steps if not args.smoke else 4,
                    sharpen=args.sharpen, view_weight=args.view_weight, loop_weight=args.loop_weight, **small)
    extra = args.extend_draft_tokens if not args.smoke else 4096
    draft = train_draft(draft_config, target, data, device, args.seed, extra, compile, length, start=draft)
    for name, config, model in (("target", target_config, target), ("draft", draft_config, draft)):
        if args.average:
            before = read_folder(first / name, config, device)
            with torch.no_grad():
                for new, old in zip(model.parameters(), before.parameters(), strict=True):
                    new.lerp_(old, 0.5)
        write_folder(out / name, config, tokenizer_file, model)
    seconds = time.time() - t0
    torch._dynamo.reset()
    clean_target, clean_draft = Transformer(target_config).to(device), Transformer(draft_config).to(device)
    for clean, trained in ((clean_target, target), (clean_draft, draft)):  # measured without compiled blocks
        clean.load_state_dict({k.replace("_orig_mod.", ""): v for k, v in trained.state_dict().items()})
    figures = evaluate(clean_target.eval(), clean_draft.eval(), args.data, sp, device, args.smoke)
    figures |= {"training_seconds": seconds, "stages": [asdict(s) for s in stages], "draft_tokens": draft_tokens,
                "extend_steps": args.extend_steps, "extend_draft_tokens": args.extend_draft_tokens, "seed": args.seed}
    (out / "figures.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps({k: v for k, v in figures.items() if k not in ("samples", "long_context")}))


if __name__ == "__main__":
    main()
