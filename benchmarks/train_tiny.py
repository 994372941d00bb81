"""Trains the embedded pair of `triforce`: a 7.5M-parameter target that reads 128K tokens, and a 0.9M draft.

    python benchmarks/tiny_data.py PACKAGES BOOKS .train       # text to tokens, once, on a CPU
    python benchmarks/train_tiny.py --data .train --out OUT    # about half an hour on one H200
    python benchmarks/train_tiny.py --data .train --out OUT --smoke    # everything once, tiny, on a CPU

First, four stages of ever longer sequences for the target, a little unlearning of loops, and the draft is distilled
from it in the regime in which it runs: a few first tokens of the document and a short recent window. Then PHASES: long
texts again, views, loops, and the draft follows. Each leaves its pair in a folder of OUT, and what is there is not done
again. Model, views and sampling are written here once more, to be trained; the library measures what comes of it.

Shapes: B batch, S sequence, D model width, H heads, V vocabulary.
"""

import argparse
import functools
import json
import lzma
import math
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tiny_data import FIRST, MAX_FACTS, REST, make_recall_document
from torch import nn


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
    weight: float  # of the learning rate's schedule that is spread over the stages
    fact_share: float  # of the sequences
    lines: tuple  # fact lines in such a sequence, from and to
    value_weight: float
    random_share: float = 0.0  # of those sequences: lines of any tokens instead of facts
    value_target: float = 0.0  # share of values that must be right at its end


# The first stage is short sequences full of facts: it settles the copying circuit that the weights start with.
STAGES = [Stage(256, 256, 30e6, 12, 1.0, (4, 20), 3.0, 0.2, 0.6), Stage(2048, 64, 330e6, 125, 0.25, (24, 80), 3.0),
          Stage(16384, 8, 70e6, 55, 0.5, (32, 128), 6.0), Stage(131072, 1, 12e6, 52, 0.7, (64, 200), 20.0)]


@dataclass
class Phase:
    steps: int
    seed: int
    sharpen: float = 1.0  # factor of all queries as it begins
    view_weight: float = 2.0  # of agreement with views
    loop_weight: float = 6.0  # of unlearning repeats
    draft_tokens: float = 40e6
    books_share: float = 0.5
    average: bool = False  # ends with the mean of its weights and those before it


PHASES = [Phase(130, 0, 1.1, 1.0, 6.0, 10e6, 0.6), Phase(120, 1, 1.1, 1.0, 6.0, 10e6, 0.4), Phase(150, 2),
          Phase(100, 4, loop_weight=12.0, average=True)]


@dataclass
class Sizes:
    """Of what the phases, the draft and the measurements read."""

    long: int = 131072
    middle: int = 16384
    rows: int = 8  # of the middle length
    new_tokens: int = 256
    every: int = 8  # steps for which the model's own texts last
    budget: int = 4096  # of a view
    blocks: int = 24
    block: int = 64
    unloop_rounds: int = 20
    draft_tokens: float = 80e6
    measured: int = 122880


SMOKE = Sizes(long=2048, middle=512, rows=4, new_tokens=16, every=1, budget=256, blocks=2, block=16, unloop_rounds=1,
              draft_tokens=4096, measured=6144)

# -- model -------------------------------------------------------------------------------------------------------------


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
        self.q, self.k, self.v, self.o = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in
                                         ((c.dim, c.ffn), (c.dim, c.ffn), (c.ffn, c.dim)))

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

    def compile_blocks(self):
        """One block, once a length, instead of the whole model. On a CPU nothing is compiled."""
        if self.embed.weight.is_cuda:
            for block in self.blocks:
                block.compile(dynamic=False)
        return self

    def logits(self, hidden):
        return F.linear(hidden, self.embed.weight.to(hidden.dtype)).float()


def compute_dtype(device):
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def autocast(device):
    return torch.autocast("cuda", torch.bfloat16, enabled=torch.device(device).type == "cuda")


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


# -- optimizer ---------------------------------------------------------------------------------------------------------


class Optimizer:
    """Muon for the matrices inside the blocks, Adam for the rest."""

    def __init__(self, model, lr=0.01, adam_lr=2e-3):
        inside = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
        self.parts = [(torch.optim.Muon(inside, weight_decay=0.05), lr),
                      (torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0), adam_lr)]

    def step(self, scale):
        for optimizer, lr in self.parts:
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad()


def rate(progress, step, warm_up):
    """The learning rate's factor: a warm-up, and a linear way down over the last 70%."""
    return min(1, (step + 1) / warm_up) * min(1, (1 - progress) / 0.7)


# -- data: tokens live on the device, and facts are written into the sequences there -----------------------------------


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

    def facts(self, n, length, lines, value_weight, random_lines):
        """Fact lines of n rows: (places, tokens, weights, which are known values), each [n, lines * 11]."""
        d = self.device
        K = int(torch.randint(lines[0], min(lines[1], (length - 1) // 12) + 1, ()))
        if torch.rand(()) < 0.5:  # all facts first, then all questions
            facts = min(K // 2, MAX_FACTS)
            orders = [torch.rand(n, facts, device=d).argsort(1) for _ in range(math.ceil(K / facts))]
            ids = torch.cat(orders, 1)[:, :K]
        else:  # any order
            facts = int(torch.randint(min(4, K // 2), min(K // 2, MAX_FACTS) + 1, ()))
            ids = torch.randint(facts, (n, K), device=d)
        first = self.first[torch.rand(n, len(FIRST), device=d).argsort(1)[:, : 2 * facts]].view(-1, facts, 2, 1)
        rest = self.rest[torch.rand(n, len(REST), device=d).argsort(1)[:, : 4 * facts]].view(-1, facts, 2, 2)
        names = torch.cat((first, rest), -1).view(-1, facts, 6)
        content = self.line.repeat(n, K, 1)  # [n, K, 11]
        content[:, :, 3:9] = names.gather(1, ids[..., None].expand(-1, -1, 6))
        same = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)  # [n, K]: said before
        weight = torch.where(same[..., None], self.old, self.new)
        weight[:, :, self.VALUE] *= value_weight
        known = torch.zeros(n, K, 11, dtype=torch.bool, device=d)
        known[: n - random_lines, :, self.VALUE] = same[: n - random_lines, :, None]
        if random_lines:  # in so many rows the lines are any eleven tokens: repeats of all kinds teach induction
            table = torch.randint(3, self.vocab, (random_lines, facts, 11), device=d)
            content[-random_lines:] = table.gather(1, ids[-random_lines:, :, None].expand(-1, -1, 11))
            weight[-random_lines:] = same[-random_lines:, :, None] * (torch.arange(11, device=d) > 0)
        start = torch.randint(1, length - 11 * K, (n, K), device=d).sort(1).values + torch.arange(K, device=d) * 11
        at = start[..., None] + torch.arange(11, device=d)
        return [x.flatten(1) for x in (at, content, weight, known)]

    def batch(self, n, length, with_facts=0, lines=(32, 80), value_weight=1.0, random_lines=0):
        """tokens [n, length + 1], weights [n, length] of the targets, known values [n, length]."""
        d = self.device
        seq = torch.zeros(n, length + 1, dtype=torch.long, device=d)
        is_fact, values = (torch.zeros(n, length + 1, dtype=torch.bool, device=d) for _ in range(2))
        weight = torch.ones(n, length + 1, device=d)
        if with_facts:
            at, *found = self.facts(with_facts, length, lines, value_weight, random_lines)
            for whole, some in zip((seq, weight, values), found, strict=True):
                whole[:with_facts].scatter_(1, at, some)
            is_fact[:with_facts].scatter_(1, at, True)
        from_books = torch.rand(n, device=d) < self.share
        read = (~is_fact).long().cumsum(1) - 1  # how many tokens of text were read before
        for part in (0, 1):
            at, tokens = self.text(part, n, length + 1)
            text = tokens[at[:, None] + read].long()
            seq = torch.where(is_fact | (from_books != (part == 0))[:, None], seq, text)
        seq[:, 0] = self.BOS
        return seq, weight[:, 1:], values[:, 1:]


# -- training ----------------------------------------------------------------------------------------------------------


def weighted_loss(hidden, head, targets, weight):
    loss = F.cross_entropy((hidden @ head.T).float(), targets, reduction="none")
    return (loss * weight).sum() / weight.sum()


@functools.cache
def compiled(function, is_cuda):
    return torch.compile(function, dynamic=False) if is_cuda else function


def text_loss(model, tokens, weight, values):
    """(loss, share of the known values that are right) of a batch."""
    with autocast(tokens.device):
        hidden = model(tokens[:, :-1])
        loss = compiled(weighted_loss, tokens.is_cuda)(hidden.flatten(0, 1), model.embed.weight.to(hidden.dtype),
                                                       tokens[:, 1:].flatten(), weight.flatten())
    with torch.no_grad():
        right = model.logits(hidden[values]).argmax(-1) == tokens[:, 1:][values]
    return loss, right.float().mean()


def train_target(c, data, stages, sizes, device):
    torch.manual_seed(0)
    model = Transformer(c)
    seed_induction(model)
    model.to(device).compile_blocks()
    optimizer, total, before, step = Optimizer(model), sum(s.weight for s in stages), 0.0, 0
    for s in stages:
        steps = max(1, int(s.tokens / s.batch / s.length))
        recent = 0.0
        for i in range(steps):
            rows = s.batch * s.fact_share
            rows = int(rows) + int(torch.rand(()) < rows - int(rows))
            loss, right = text_loss(model, *data.batch(s.batch, s.length, rows, s.lines, s.value_weight,
                                                       int(rows * s.random_share)))
            loss.backward()
            optimizer.step(rate((before + s.weight * i / steps) / total, step, 300))
            step += 1
            if i % max(1, steps // 20) == 0 or i == steps - 1:
                recent = right.item() if rows else recent
                print(f"length {s.length} step {i}/{steps} loss {loss.item():.3f} values {recent:.3f}", flush=True)
        before += s.weight
        if recent < s.value_target:
            raise SystemExit(f"values {recent:.3f} below {s.value_target} after the first stage: not worth going on")
    unloop(model, optimizer, data, stages[1], sizes.unloop_rounds)
    return model.eval()


def unlikelihood(model, tokens, new_tokens):
    """Mean over the sampled tokens of -log(1 - p), counted where a token repeats eight earlier sampled ones."""
    new = tokens[:, -new_tokens:]
    hidden = model(tokens[:, :-1])[:, -new_tokens:]
    again = repeats(new)
    p = model.logits(hidden[again]).softmax(-1).gather(1, new[again][:, None])
    return -torch.log1p(-p.clamp_max(0.999)).sum() / new.numel(), again.float().mean()


def unloop(model, optimizer, data, stage, rounds):
    """A model this small falls into loops when it samples. It samples, and unlearns the repeats (Welleck et al.,
    "Neural text generation with unlikelihood training", 2019), beside ordinary batches."""
    rows, length, new_tokens = stage.batch, stage.length, min(256, stage.length // 8)
    for i in range(rounds):
        prompts = torch.cat([data.batch(rows, length - new_tokens - 1)[0] for _ in range(4)])
        written = torch.cat((prompts, sample(model, prompts, new_tokens, seed=i)), 1)
        for part in written.split(rows):
            loss, _ = text_loss(model, *data.batch(rows, length, rows // 4, (16, length // 24), 3.0))
            with autocast(data.device):
                again, share = unlikelihood(model, part, new_tokens)
            (loss + 4 * again).backward()
            optimizer.step(0.1 * (1 - i / rounds))
        print(f"unloop {i}/{rounds} loss {loss.item():.3f} repeated {share.item():.3f}", flush=True)


TEMPERATURES = (1.0, 0.6)  # at which views and drafts are to agree with the full cache


def view_loss(model, tokens, sizes, budget):
    """One minus the expected acceptance of blocks that are read through a retrieval view, against the full cache
    (constant); the mean of that at the two temperatures."""
    with torch.no_grad():
        full = Recorded()
        hidden = model(tokens, attend=full)[0]  # [S, D]
    recent = budget // 4
    starts = torch.randint(budget + recent, tokens.shape[1] - sizes.block, (sizes.blocks,), device=tokens.device)
    at = starts[:, None] + torch.arange(sizes.block, device=tokens.device)
    exact = model.logits(hidden[at])
    seen = model.logits(view_hidden(model, full, tokens, starts, sizes.block, budget, recent))
    return 1 - sum(acceptance(exact, seen, t).mean() for t in TEMPERATURES) / len(TEMPERATURES)


def extend(model, data, phase, sizes):
    """Every step: one long text; several of a middle length; blocks that read one of these through a retrieval view,
    chosen at the block's beginning, as in decoding. From 40% on, texts that the model has continued itself, to unlearn
    loops."""
    torch.manual_seed(phase.seed + 2)
    data.share = phase.books_share
    with torch.no_grad():  # attention spreads over more tokens the longer the text
        for block in model.blocks:
            block.q.weight *= phase.sharpen
    optimizer, parts, rows, share = Optimizer(model.compile_blocks()), [], sizes.rows, torch.zeros(())
    for i in range(phase.steps):
        far = data.batch(1, sizes.long, int(torch.rand(()) < 0.7), (24, min(150, sizes.long // 24)), 20.0)
        near = data.batch(rows, sizes.middle, rows // 2, (16, min(128, sizes.middle // 24)), 6.0)
        seen = []
        for batch, weight in ((far, 1.0), (near, 0.5)):
            loss, right = text_loss(model, *batch)
            (weight * loss).backward()
            seen += [loss.item(), right.item()]
        read, held = far[0], sizes.budget
        if i % 2:
            read, held = near[0][i % rows, None], sizes.budget // (4 if i % 4 == 1 else 8)
        with autocast(data.device):
            view = view_loss(model, read[:, :-1], sizes, held)
        (phase.view_weight * view).backward()
        if i >= 0.4 * phase.steps:
            if not parts:
                data.share = 0.3  # documentation loops more
                prompts = data.batch(4 * rows * sizes.every, sizes.middle // 8 - sizes.new_tokens)[0]
                data.share = phase.books_share
                written = torch.cat((prompts, sample(model, prompts, sizes.new_tokens, seed=1000 + i)), 1)
                parts = list(written.split(4 * rows))
            with autocast(data.device):
                again, share = unlikelihood(model, parts.pop(), sizes.new_tokens)
            (phase.loop_weight * again).backward()
        optimizer.step(0.5 * rate(i / phase.steps, i, 15))
        if i % 4 == 0 or i == phase.steps - 1:
            print(f"extend {i}/{phase.steps} loss and values, far and near: {[round(x, 3) for x in seen]}, views "
                  f"{1 - view.item():.3f}, repeated {share.item():.3f}", flush=True)
    return model.eval()


def distil_loss(student, head, teacher, teacher_head, keep, mix):
    """Kullback-Leibler divergence, then (mix = 1) total variation: one minus the expected acceptance, the mean of that
    at the two temperatures."""
    q_log = (student @ head.T).float().log_softmax(-1)
    p_log = (teacher @ teacher_head.T).float().log_softmax(-1)
    kl = (p_log.exp() * (p_log - q_log)).sum(-1)
    tv = sum(0.5 * ((p_log / t).softmax(-1) - (q_log / t).softmax(-1)).abs().sum(-1) for t in TEMPERATURES)
    tv = tv / len(TEMPERATURES)
    scale = keep / keep.sum()
    return ((1 - mix) * kl + 2 * mix * tv).mul(scale).sum(), (tv * scale).sum()


def train_draft(c, target, data, seed, tokens, length, start=None, window=512, batch=4):
    """The draft sees 4 first tokens and a short window; the target, whose distribution it learns, has seen all."""
    torch.manual_seed(seed + 1)
    device = data.device
    model = (start or Transformer(c).to(device)).compile_blocks()
    optimizer = Optimizer(model, 0.02, 3e-3) if start is None else Optimizer(model, 0.006, 1e-3)
    n = (length - 4) // (window - 4)  # windows a sequence
    used, steps = n * (window - 4), max(1, int(tokens / (batch * length)))
    keep = (torch.arange(window - 4, device=device) >= 64).float().repeat(batch * n)
    for i in range(steps):
        seq = data.batch(batch, length, int(i % 4 == 0))[0][:, :-1]
        with torch.no_grad(), autocast(device):
            teacher = target(seq)[:, 4 : 4 + used].reshape(-1, target.c.dim)
        windows = torch.cat((seq[:, None, :4].expand(-1, n, -1), seq[:, 4 : 4 + used].view(batch, n, -1)), -1)
        mix = torch.tensor(1.0 if start else min(1.0, max(0.0, (i / steps - 0.4) / 0.2)), device=device)
        with autocast(device):
            student = model(windows.flatten(0, 1))[:, 4:].reshape(-1, c.dim)
            loss, tv = compiled(distil_loss, seq.is_cuda)(student, model.embed.weight.to(student.dtype), teacher,
                                                          target.embed.weight.to(teacher.dtype), keep, mix)
        loss.backward()
        optimizer.step(rate(i / steps, i, 100))
        if i % max(1, steps // 10) == 0 or i == steps - 1:
            print(f"draft step {i}/{steps} loss {loss.item():.3f} acceptance {1 - tv.item():.3f}", flush=True)
    return model.eval()


# -- views and samples -------------------------------------------------------------------------------------------------


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
def sample(model, prompts, new_tokens, temperature=0.6, top_p=0.9, seed=0):
    """One continuation a row: prompts [B, S] -> token ids [B, new_tokens]."""
    full, (B, S), d = Recorded(), prompts.shape, prompts.device
    with autocast(d):
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


# -- measuring, by the library, on held-out text -----------------------------------------------------------------------


def evaluate(folder, path, sp, length):
    """Loss with all of a text and with 4K of it, acceptance of both views and of the draft, recall, and repeats."""
    import triforce

    def load(view="retrieval"):
        return triforce.load(folder / "target", draft=folder / "draft", draft_cache=view, gamma=6,
                             budget=length // 30 // 8 * 8)

    books, ends = load_tokens(path, "heldout_books")
    corpora = {f"book {i}": books[start:] for i, start in enumerate([0, *ends[:-1]])}
    corpora |= {name: load_tokens(path, name)[0] for name in ("heldout_docs", "default_prompt")}
    engine, streaming, figures = load(), load("streaming"), {}
    for name, tokens in corpora.items():
        ids = [1, *tokens[:length].tolist()]
        truth, row = torch.tensor(ids[-1024:]), {}
        for what, context in (("loss", ids[:-1]), ("loss_4k", ids[-4097:-1])):
            logits = engine.logits([context], last=1024)[0].cpu()
            row[what] = F.cross_entropy(logits, truth).item()
        for view, one in (("retrieval", engine), ("streaming", streaming)):
            for temperature, top_p in ((1.0, 1.0), (0.6, 0.9)):
                drawn = one.generate(ids, 512, temperature=temperature, top_p=top_p, seed=0, ignore_eos=True)
                row[f"{view} at {temperature}"] = drawn.stats.acceptance_rate
        figures[name] = row
        print(name, json.dumps(row), flush=True)
    rng, book = np.random.default_rng(1), sp.decode(books.tolist())
    asked = [make_recall_document(rng, sp.encode, book, length // 8, depth) for depth in np.linspace(0, 1, 50)]
    answers = [engine.generate(prompt, len(answer), temperature=0.0).tokens for prompt, answer in asked]
    figures["recall"] = float(np.mean([said == answer for said, (_, answer) in zip(answers, asked, strict=True)]))
    drawn = engine.generate([1, *corpora["default_prompt"][: length // 8].tolist()], 256, num_samples=16, seed=0,
                            temperature=0.6, top_p=0.9, ignore_eos=True)
    figures["most_repeated_8gram"] = [most_repeated(one.tokens) for one in drawn]
    figures["samples"] = [one.text for one in drawn]
    return figures


# -- Hugging Face folders ----------------------------------------------------------------------------------------------


HF_NAMES = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
            **{name: f"self_attn.{name}_proj" for name in "qkvo"},
            **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}}


def hf_name(name):
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    if name == "norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}.weight"


def write_folder(folder, c, tokenizer_file, model):
    """With the configurations of the embedded pair, but for the sizes."""
    from safetensors.torch import save_file

    from triforce.hf.folders import TINY

    shutil.copytree(TINY / "target" if folder.name == "target" else TINY / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"head_dim": c.dim // c.n_head, "hidden_size": c.dim, "intermediate_size": c.ffn,
               "max_position_embeddings": c.max_len, "num_attention_heads": c.n_head, "num_hidden_layers": c.n_layer,
               "num_key_value_heads": c.n_head, "rms_norm_eps": c.eps, "rope_theta": c.theta, "vocab_size": c.vocab}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(tokenizer_file, folder / "tokenizer.model")
    tensors = {hf_name(n): p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_folder(folder, c, device):
    from safetensors.torch import load_file

    model, tensors = Transformer(c), load_file(folder / "model.safetensors")
    model.load_state_dict({n: tensors[hf_name(n)].float() for n, _ in model.named_parameters()})
    return model.to(device)


def main():
    import sentencepiece as spm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=".train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny configuration, on any device")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer_file = args.data / "tokenizer.model"
    sp = spm.SentencePieceProcessor(model_file=str(tokenizer_file))
    data = Data(args.data, sp, device)
    configs, stages, phases, sizes = {"target": TARGET, "draft": DRAFT}, STAGES, PHASES, Sizes()
    if args.smoke:
        configs = {name: replace(c, n_layer=2, dim=64, n_head=1, ffn=96) for name, c in configs.items()}
        stages = [replace(s, length=size, batch=2, tokens=4 * size, lines=(4, 8), value_target=0)
                  for s, size in zip(STAGES, (256, 512, 1024, 2048), strict=True)]
        phases, sizes = [replace(phase, steps=4, draft_tokens=4096) for phase in PHASES], SMOKE
    torch.set_float32_matmul_precision("high")

    def read(folder):
        return [read_folder(folder / name, c, device) for name, c in configs.items()]

    def write(folder, *pair):
        for (name, c), model in zip(configs.items(), pair, strict=True):
            write_folder(folder / name, c, tokenizer_file, model)
        torch._dynamo.reset()

    folder = args.out / "0"
    if not folder.exists():
        target = train_target(configs["target"], data, stages, sizes, device)
        write(folder, target, train_draft(configs["draft"], target, data, 0, sizes.draft_tokens, sizes.middle))
    for number, phase in enumerate(phases, 1):
        (target, draft), before, folder = read(folder), read(folder), args.out / str(number)
        if folder.exists():
            continue
        extend(target, data, phase, sizes)
        train_draft(configs["draft"], target, data, phase.seed, phase.draft_tokens, sizes.middle, draft)
        if phase.average:
            with torch.no_grad():
                for model, old in zip((target, draft), before, strict=True):
                    for new, was in zip(model.parameters(), old.parameters(), strict=True):
                        new.lerp_(was, 0.5)
        write(folder, target, draft)
    (args.out / "figures.json").write_text(json.dumps(evaluate(folder, args.data, sp, sizes.measured), indent=1))


if __name__ == "__main__":
    main()
