"""TriForce in plain PyTorch, to be read from top to bottom: one sequence, no caches, float64.

The method is hierarchical speculative decoding (arXiv 2404.11912). Three levels give a distribution of the next token:

    full         the target over its whole context: what is to be sampled from
    retrieval    the target over a few chunks of its context, the view: nearly the same distribution, much less to read
    draft        a small model over the first and the newest tokens: cheap, and often wrong

In a round the draft guesses a few tokens, the retrieval level checks them and keeps some, several times in a row. The
full level checks all that came of it in one pass. Each check leaves the distribution of the level that checks: a token
x from a distribution q is kept with probability min(1, p(x) / q(x)), and after a rejection the next token is drawn from
what p has and q lacks (Leviathan et al., arXiv 2211.17192). So a level that checks is a draft for the level above.
Greedy decoding is the case in which every distribution has all its mass on one token. With coupled sampling all levels
draw with the same noise (the Gumbel-max trick), and a token is kept if the level above draws it, too.

    python -m triforce.naive            prints three rounds of the embedded pair, step by step

Every pass computes the whole text anew. The library gives the same tokens for the same seed, if its plan is fixed and
its view is chosen anew in each round. tests/test_naive.py compares the two.

What the library does besides. It keeps keys and values, of the long context in one place and of the newest tokens in
another, and merges attention over both. It records its steps as CUDA graphs, and compiles them on request. It runs many
sequences side by side and shares what their prompts have in common. It keeps long contexts in host memory or in files,
and splits models over several GPUs. A controller chooses for each round what drafts, and how much. A view lasts for
several rounds. N-grams draft, too. With coupled sampling a round checks trees of tokens. None of this changes a
distribution.

Shapes: S tokens of the text, n drafted tokens, H query heads, K KV heads, D head_dim, C chunks, V vocabulary.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .decode.gumbel import exponential
from .decode.sampling import ACCEPT, SAMPLE, key_of, uniform
from .decode.tape import DRAFT, FULL, RETRIEVAL
from .model import Transformer

# 1. The model


def forward(model: Transformer, tokens: list[int], view: list[Tensor] | None = None, settled: int = 0):
    """One pass over a text: the logits after each token, and the queries and keys of each layer.

    Args:
        view: of each layer, [K, T]: which of the first T tokens the positions from `settled` on see. They see all
            tokens after T. Positions before `settled` see all. None: all positions see all.

    Returns:
        logits [S, V]; by layer, queries [H, S, D]; by layer, keys [K, S, D].
    """
    config, position = model.config, torch.arange(len(tokens))
    group = config.n_head // config.n_kv_head  # query heads that share a KV head
    angles = model.rope(position)  # cos, sin [kinds, S, D]
    x, queries, keys = model.embed(torch.tensor(tokens)), [], []  # [S, dim]
    for i, layer in enumerate(model.layers):
        heads = layer.attention.project(layer.attention_norm(x)[None])[0]
        q, k, v = heads.split([config.n_head, config.n_kv_head, config.n_kv_head])  # [H or K, S, D]
        cos, sin = model.rope.of_layer(i, *angles)
        q, k = (y * cos + y.roll(config.head_dim // 2, -1) * sin for y in (q, k))
        seen = position <= position[:, None]  # [S, S]: the queries down, the keys across
        if i in config.sliding_layers:
            seen = seen & (position > position[:, None] - config.sliding_window)
        elif view is not None:
            in_view = F.pad(view[i], (0, len(tokens) - view[i].shape[1]), value=True)  # [K, S]
            exact = position < settled
            seen = seen & (exact[:, None] | in_view[:, None, :]).repeat_interleave(group, 0)  # [H, S, S]
        scores = q.double() @ k.double().repeat_interleave(group, 0).transpose(1, 2) / config.head_dim**0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        if config.sinks:  # a key more, whose value is 0
            scores = torch.cat([scores, layer.attention.sinks[:, None, None].expand(-1, len(tokens), 1)], -1)
        weights = scores.softmax(-1)[..., : len(tokens)]
        y = weights @ v.double().repeat_interleave(group, 0)  # [H, S, D]
        x = x + layer.attention_out_norm(layer.attention.out(y.to(x.dtype).transpose(0, 1).flatten(1)))
        x = x + layer.mlp_out_norm(layer.mlp(layer.mlp_norm(x)[None])[0])
        queries.append(q)
        keys.append(k)
    return model.output(model.norm(x)), queries, keys


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits [..., V] -> probabilities [..., V]: all on the likeliest token for temperature 0, else tempered and cut to
    the most probable tokens that have the mass top_p together."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    probs = (logits / temperature).softmax(-1)
    if top_p < 1:
        ranked = probs.sort(-1, descending=True).values
        before = ranked.cumsum(-1) - ranked
        least = ranked.masked_fill(before >= top_p, 1.0).amin(-1, keepdim=True)
        probs = probs.where(probs >= least, 0.0)
    return probs / probs.sum(-1, keepdim=True)


# 2. Drawing and checking one token


def sample(probs: Tensor, u: float) -> int:
    """The token at which the running sum of probs [V] (any positive sum) passes u."""
    upto = probs.cumsum(-1)
    return int((upto <= u * upto[-1]).sum())


def race(probs: Tensor, seed: int, position: int) -> int:
    """The token that arrives first: each arrives at an exponential time, divided by its probability. The time depends
    on seed, position and token alone: distributions that are alike draw the same token."""
    key = key_of(torch.tensor([seed]), torch.tensor([[position]])).flatten()
    return int((exponential(key, torch.arange(len(probs))) / probs).argmin())


def is_accepted(draft_prob: Tensor, prob: Tensor, u: float) -> bool:
    """With probability min(1, prob / draft_prob)."""
    return bool(u * draft_prob < prob)


def residual(probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What the level that checks has and the draft lacks: [V], unnormalised. Between equal distributions rounding may
    leave nothing of it."""
    rest = (probs - draft_probs).clamp(min=0)
    return rest if rest.sum() > 0 else probs


# 3. The levels


class Check(NamedTuple):
    """What became of a chain of drafted tokens."""

    drafted: list[int]
    num_accepted: int
    token: int  # recovered, in the place of the first that was rejected; or the bonus token after all of them

    @property
    def tokens(self) -> list[int]:
        return self.drafted[: self.num_accepted] + [self.token]


class Brought(NamedTuple):
    """What a round brought."""

    inner: list[Check]  # by the retrieval level
    outer: Check  # by the full level
    tokens: list[int]  # that the text grew by


@dataclass
class TriForce:
    """The three levels, for one sequence and a fixed plan."""

    target: Transformer
    draft: Transformer | None  # None: the retrieval level drafts by itself
    vocab_size: int  # tokens that the tokenizer can name; logits beyond are padding
    gamma: int = 6  # tokens proposed to the full level, at most
    gamma_inner: int = 2  # tokens that the draft proposes to the retrieval level
    rounds: int = 3  # of the retrieval level in a round of the full one
    retrieval: bool = True  # False: the full level checks the draft
    budget: int = 64  # tokens of the view: the first chunk, the window of the newest, and chunks chosen in between
    chunk_size: int = 8
    window: int = 32
    interval: int = 32  # the view is chosen from whole intervals of the text; the rest, the tail, is always seen
    newest: int = 8  # tokens at the end of the prompt that choose the first view
    draft_sink: int = 4
    draft_window: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    coupled: bool = False
    seed: int = 0

    def probs(self, model: Transformer, text: list[int], count: int, *view) -> Tensor:
        """The distributions after each of the last `count` tokens, [count, V]. view: see `forward`."""
        logits, _, _ = forward(model, text, *view)
        return distribution(logits[-count:, : self.vocab_size], self.temperature, self.top_p)

    def noise(self, level: int, position: int, purpose: int) -> float:
        """A number in [0, 1) that follows from its arguments: what is drafted, discarded and drafted again meets the
        same one."""
        return float(uniform(torch.tensor([self.seed]), torch.tensor([[position]]), level, purpose))

    def draw(self, probs: Tensor, level: int, position: int) -> int:
        """The token at a position of the text, by probs [V]."""
        if self.coupled:
            return race(probs, self.seed, position)
        return sample(probs, self.noise(level, position, SAMPLE))

    def check(self, level: int, position: int, drafted: list[int], draft_probs: list[Tensor], probs: Tensor) -> Check:
        """Keeps drafted tokens up to the first that does not pass, and draws one more. Of both levels that check.

        Args:
            position: of the first drafted token. draft_probs: the distributions that they were drawn from, [V] each.
            probs: [n + 1, V], those of the level that checks, for the same places, and for the one behind.
        """
        for i, token in enumerate(drafted):
            if self.coupled:
                drawn = self.draw(probs[i], level, position + i)
                if drawn != token:
                    return Check(drafted, i, drawn)
            elif not is_accepted(draft_probs[i][token], probs[i][token], self.noise(level, position + i, ACCEPT)):
                recovered = self.draw(residual(probs[i], draft_probs[i]), level, position + i)
                return Check(drafted, i, recovered)
        return Check(drafted, len(drafted), self.draw(probs[-1], level, position + len(drafted)))

    def propose(self, text: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        """The draft: `count` tokens after the text, and the distributions that they were drawn from. It reads the first
        and the newest tokens as if they stood side by side (StreamingLLM, arXiv 2309.17453)."""
        drafted, draft_probs = [], []
        for _ in range(count if self.draft else 0):
            known = text + drafted
            read = known[: self.draft_sink] + known[self.draft_sink :][-self.draft_window :]
            draft_probs.append(self.probs(self.draft, read, 1)[0])
            drafted.append(self.draw(draft_probs[-1], DRAFT, len(known)))
        return drafted, draft_probs

    def choose_view(self, text: list[int], first: int) -> list[Tensor] | None:
        """The tokens of the settled text that the retrieval level sees, by layer, [K, T] each; None: all.

        Args:
            first: the queries from this position on choose: those of the tokens that the last round settled.
        """
        settled = len(text) - 1  # the last token is pending: no pass has computed it yet
        end = settled - settled % self.interval  # where the tail begins
        if end <= self.budget:
            return None
        _, queries, keys = forward(self.target, text[:settled])
        choices, start = slice(self.chunk_size, end - self.window), self.chunk_size + self.window
        count, view = (self.budget - start) // self.chunk_size, []
        for q, k in zip(queries, keys, strict=True):
            means = k[:, choices].unflatten(1, (-1, self.chunk_size)).mean(2)  # [K, C, D]
            q = q[:, first:].unflatten(0, (len(k), -1)).flatten(1, 2)  # [K, G * rows, D]
            attended = (q @ means.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1).sum(1)  # [K, C]
            best = torch.zeros_like(attended, dtype=torch.bool).scatter(1, attended.topk(count).indices, True)
            seen = torch.ones(len(k), end, dtype=torch.bool)  # the first chunk and the window are
            seen[:, choices] = best.repeat_interleave(self.chunk_size, 1)
            view.append(seen)
        return view

    def propose_by_view(self, text: list[int], first: int) -> tuple[list[int], list[Tensor], list[Check]]:
        """The retrieval level: as `propose`, at most gamma tokens in some rounds of its own. What it emits follows its
        own distributions, so these are what the full level has to know."""
        view, settled = self.choose_view(text, first), len(text) - 1
        drafted, draft_probs, checks = [], [], []
        for _ in range(self.rounds):
            guess, guess_probs = self.propose(text + drafted, self.gamma_inner)
            probs = self.probs(self.target, text + drafted + guess, len(guess) + 1, view, settled)
            checks.append(self.check(RETRIEVAL, len(text + drafted), guess, guess_probs, probs))
            kept = checks[-1].tokens[: self.gamma - len(drafted)]  # cut at a length that is fixed beforehand
            drafted, draft_probs = drafted + kept, draft_probs + list(probs[: len(kept)])
            if len(drafted) == self.gamma:
                break
        return drafted, draft_probs, checks

    def round(self, text: list[int], first: int) -> Brought:
        """One pass of the full level, and all that is drafted for it."""
        checks = []
        if self.retrieval:
            drafted, draft_probs, checks = self.propose_by_view(text, first)
        else:
            drafted, draft_probs = self.propose(text, self.gamma)
        probs = self.probs(self.target, text + drafted, len(drafted) + 1)
        outer = self.check(FULL, len(text), drafted, draft_probs, probs)
        room = self.interval - (len(text) - 1) % self.interval  # a round ends where the tail is full
        return Brought(checks, outer, outer.tokens[:room])

    @torch.inference_mode()
    def generate(self, prompt: list[int]) -> Iterator[Brought]:
        """Rounds without end."""
        text, first = list(prompt), max(len(prompt) - 1 - self.newest, 0)
        while True:
            brought = self.round(text, first)
            first = len(text) - 1
            text += brought.tokens
            yield brought

    @torch.inference_mode()
    def plain(self, prompt: list[int], count: int) -> list[int]:
        """So many tokens of the full level alone. Greedy and coupled, it is the text of `generate`."""
        text = list(prompt)
        for _ in range(count):
            text.append(self.draw(self.probs(self.target, text, 1)[0], FULL, len(text)))
        return text[len(prompt) :]


# 4. What it does, step by step

TEXT = """
Remember: ZugPidHok PojVuxXab.
The road went down to the river, and along the river to the mill. There was nobody at the mill. The wheel stood still,
and the door was open, so they went in and sat down by the fire. After a while an old man came in with a lamp in his
hand. He asked them where they came from and what they wanted. They said that they had lost their way in the wood.
Remember: ZugPidHok"""


def main() -> None:
    from .hf.checkpoint import load_model
    from .hf.folders import TINY
    from .hf.tokenizer import Tokenizer

    torch.set_num_threads(1)  # passes this small gain nothing from more
    tokenizer = Tokenizer(TINY / "target")
    target, draft = (load_model(TINY / name, dtype=torch.float64) for name in ("target", "draft"))
    levels = TriForce(target, draft, tokenizer.vocab_size, temperature=0.0, draft_window=64)
    prompt = tokenizer.encode(TEXT)
    print(f"The prompt has {len(prompt)} tokens, and ends as it begins: 'Remember: ZugPidHok'.\n"
          f"The draft reads the first {levels.draft_sink} and newest {levels.draft_window}, so it cannot know the rest."
          f"\nThe retrieval level reads {levels.budget}, its view, and the full level reads all.")

    def quoted(tokens: list[int]) -> str:
        return " ".join(repr(tokenizer.decode([token])) for token in tokens) or "none"

    rounds = list(itertools.islice(levels.generate(prompt), 5))
    for number, brought in enumerate(rounds[:3], 1):
        print(f"\nRound {number}")
        inner = [("draft", "retrieval level", check) for check in brought.inner]
        for below, level, check in [*inner, ("retrieval level", "full level", brought.outer)]:
            missed = check.num_accepted < len(check.drafted)
            kept = quoted(check.drafted[: check.num_accepted]) if missed else "all"
            print(f"  The {below} guesses {quoted(check.drafted)}.\n    The {level} keeps {kept}, then says "
                  f"{quoted([check.token])} ({'recovered' if missed else 'bonus'}).")
        print(f"  So the text goes on: {quoted(brought.tokens)}")
    text = [token for brought in rounds for token in brought.tokens]
    same = levels.plain(prompt, len(text)) == text
    print(f"\n{len(rounds)} passes of the full level brought {len(text)} tokens:\n{tokenizer.decode(text)!r}\n"
          f"Plain decoding, {len(text)} passes: {'the same text' if same else 'another text'}.")


if __name__ == "__main__":
    main()
