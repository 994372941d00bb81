"""The Llama family in one file: Llama, Mistral, Qwen, Gemma, OLMo, Phi, GLM, gpt-oss and what shares their config.json.

Read it from the top to the bottom: configuration, rotary embedding, attention, MLP, block, model. The model knows
nothing of caches: a layer gives its unrotated queries, keys and values to `kv.write`, has the cache read by `kv.read`,
and joins what both saw. It knows nothing of sampling either. What only a CPU needs, or weights in fp8, or several
ranks, is put in from `cpu.py`, `fp8.py` and `parallel.py`.

Shapes: B batch, M rows of a block (new tokens), H query heads, K KV heads, D head_dim, F ffn_dim, V vocabulary.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import attention, cpu, fp8
from .experts import Experts, has_grouped_product
from .fp8 import FP8, Float8


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the window that the model was first trained on."""

    kind: str = "default"  # default | linear | llama3 | yarn | longrope
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: scales cos and sin
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope: of each pair, within the original window
    long_factor: tuple[float, ...] = ()  # longrope: of each pair, for a window that is longer


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the model's shape and arithmetic depend on. `hf/config.py` reads it from a config.json."""

    vocab_size: int
    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    ffn_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    rotary_factor: float = 1.0  # share of a head's dimensions, the first ones, that are rotated
    rotary_interleaved: bool = False  # in the checkpoint, the two that a pair turns stand side by side
    max_position_embeddings: int = 2048
    sliding_window: int | None = None  # newest keys, with the token's own, that `sliding_layers` see
    unchunked_window: int | None = None  # beyond it the model has dual chunk attention, which is not built
    qk_norm: bool = False  # of each head of queries and keys, before they are rotated
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    architecture: str = "LlamaForCausalLM"
    dtype: str | None = None
    num_shards: int = 1  # ranks; heads, KV heads and ffn_dim are those of one of them, see parallel.py
    # Linear layers in fp8. Not in the repr, by which models are known: one without such layers is known as ever.
    float8: Float8 | None = field(default=None, repr=False)
    nope_layers: tuple[int, ...] = field(default=(), repr=False)  # without rotation (NoPE, arXiv 2305.19466)
    num_experts: int = field(default=0, repr=False)  # of ffn_dim each; 0: one MLP
    active_experts: int = field(default=0, repr=False)  # of a token
    weighs_anew: bool = field(default=False, repr=False)  # the weights of a token's experts add up to 1
    sliding_layers: tuple[int, ...] = field(default=(), repr=False)
    sliding_theta: float | None = field(default=None, repr=False)  # base of these layers, unscaled. None: as the others
    qk_norm_whole: bool = field(default=False, repr=False)  # over all heads together
    pre_norm: bool = field(default=True, repr=False)  # of what goes into attention and MLP
    post_norm: bool = field(default=False, repr=False)  # of what comes out of them
    shifted_norms: bool = field(default=False, repr=False)  # their weights are those of the checkpoint, and 1
    query_scale: float = field(default=1.0, repr=False)  # of the weights of q_norm
    activation: str = field(default="silu", repr=False)  # or "gelu", by its tanh; of experts also "clamped"
    sinks: bool = field(default=False, repr=False)  # a learned logit of each head that no key has (arXiv 2309.17453)
    embedding_scale: float = field(default=1.0, repr=False)

    @property
    def full_layers(self) -> list[int]:
        """Those that see all keys."""
        return [i for i in range(self.n_layer) if i not in self.sliding_layers]

    @property
    def max_len(self) -> int:
        """The most positions that the model can attend over: its trained ones, or those before another way to attend,
        which is not built, would set in."""
        return min(self.max_position_embeddings, self.unchunked_window or self.max_position_embeddings)

    @property
    def limit_name(self) -> str:
        """What `max_len` ends at."""
        names = {self.unchunked_window: "window before dual_chunk_attention_config, which is not supported",
                 self.max_position_embeddings: "positions"}
        return names[self.max_len]

    def within(self, max_seq_len: int | None) -> "ModelConfig":
        """For sequences of at most max_seq_len positions. LongRoPE has other frequencies within its original window
        than for longer ones. Keys are kept rotated, so one of the two serves a model for good: the longer ones', unless
        no sequence leaves the original window."""
        original = self.rope_scaling.original_max_position_embeddings
        if self.rope_scaling.kind != "longrope" or max_seq_len is None or max_seq_len > original:
            return self
        return replace(self, max_position_embeddings=min(original, self.max_position_embeddings))

    def quantized(self, weights: str | None) -> "ModelConfig":
        """`weights` says "fp8": with the layers of the blocks so, unless a checkpoint has fp8 of its own; "wide":
        without fp8; None: as it is."""
        if weights == "wide":
            return replace(self, float8=None)
        return self if weights is None or self.float8 is not None else replace(self, float8=fp8.MADE)

    @property
    def query_group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_head // self.n_kv_head

    @property
    def rotary_dim(self) -> int:
        """Of a head's dimensions, those that are rotated."""
        return int(self.head_dim * self.rotary_factor)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token adds over all layers."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim

    @property
    def weights_in_tokens(self) -> int:
        """Tokens whose K and V have as many elements as the weights."""
        return self.num_parameters // self.kv_elements_per_token

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the output layer: this rank's share of the vocabulary, rounded up."""
        return -(-self.vocab_size // self.num_shards)

    @property
    def num_parameters(self) -> int:
        rows = self.head_dim * (self.n_head + 2 * self.n_kv_head)  # of the fused projection
        attention = self.dim * (rows + self.head_dim * self.n_head)
        heads = self.n_head + self.n_kv_head if self.qk_norm_whole else 2
        norms = 2 * self.dim * (self.pre_norm + self.post_norm) + heads * self.head_dim * self.qk_norm
        biases = rows * self.qkv_bias + self.dim * self.out_bias + self.n_head * self.sinks
        each = 3 * self.dim * self.ffn_dim + (2 * self.ffn_dim + self.dim) * self.mlp_bias
        mlp = each * max(self.num_experts, 1) + (self.dim + self.mlp_bias) * self.num_experts
        embeddings = self.vocab_rows * self.dim * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.n_layer * (attention + biases + mlp + norms) + self.dim


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[rotary_dim / 2] float32: radians per position of each rotary pair, after the config's scaling.

    Sources: RoPE arXiv 2104.09864; linear arXiv 2306.15595; YaRN arXiv 2309.00071 (NTK by parts); LongRoPE arXiv
    2402.13753; llama3: the Llama 3.1 release, which interpolates between scaled and unscaled by wavelength.
    """
    dim, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim)  # over 2 pi
    inv_freq = 1.0 / wavelengths
    if scaling.kind == "default":
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    original = scaling.original_max_position_embeddings
    if scaling.kind == "longrope":  # see `ModelConfig.within`
        factors = scaling.long_factor if config.max_position_embeddings > original else scaling.short_factor
        return 1.0 / (torch.tensor(factors, device="cpu") * wavelengths)
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / inv_freq
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq

    # YaRN: pairs that turn more than beta_fast times within the original window keep their speed, those that turn
    # less than beta_slow times are slowed down by the factor, with a linear ramp between.
    def pair_with_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    ramp = ramp.clamp(0, 1)
    return inv_freq * (1 - ramp) + inv_freq / scaling.factor * ramp


class RotaryEmbedding(nn.Module):
    """Angles by position, in float32 whatever the model's dtype: bf16 cannot tell position 124,928 from 124,929.

    Layers may be of up to three kinds: rotated as the config says; by a base of their own; not at all.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", _of_kinds(config), persistent=False)  # [kinds, D]

    def _apply(self, fn, recurse=True):
        # Follows the model to its device, but never to its dtype, and survives a model built on the meta device.
        device = fn(torch.empty(0)).device
        self.frequencies = _of_kinds(self.config).to(device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] (any integer or float dtype) -> cos, sin [kinds, ..., D], float32, sign of the sine folded
        in."""
        frequencies = self.frequencies.view(-1, *[1] * positions.ndim, self.config.head_dim)
        angles = positions[..., None].float() * frequencies
        cos, sin, factor = angles.cos(), angles.sin(), self.config.rope_scaling.attention_factor
        if factor == 1.0:
            return cos, sin
        scale = torch.where(frequencies == 0, 1.0, factor)  # what is not rotated is not scaled
        scale = torch.cat([scale[:1], torch.ones_like(scale[1:])])
        return cos * scale, sin * scale

    def of_layer(self, i: int, cos, sin) -> tuple[Tensor, Tensor]:
        """What turns the queries and keys of layer i, out of what there is for each kind."""
        of = self.config
        kind = -1 if i in of.nope_layers else int(of.sliding_theta is not None and i in of.sliding_layers)
        return cos[kind], sin[kind]


def _of_kinds(config: ModelConfig) -> Tensor:
    kinds = [_both_halves(config)]
    if config.sliding_theta is not None:
        kinds.append(_both_halves(replace(config, rope_theta=config.sliding_theta, rope_scaling=RopeScaling())))
    return torch.stack([*kinds, *[torch.zeros_like(kinds[0])] * bool(config.nope_layers)])


def _both_halves(config: ModelConfig) -> Tensor:
    """[D]: of the two that a pair turns, the first subtracts the other's share of the sine. What is not rotated stands
    still."""
    inv_freq = inverse_frequencies(config)
    inv_freq = F.pad(inv_freq, (0, config.head_dim // 2 - len(inv_freq)))
    return torch.cat([-inv_freq, inv_freq])


def eager(function):
    """Instead of a compiler: the function as it is."""
    return function


class ShiftedNorm(nn.RMSNorm):
    """Its weight is what a checkpoint has, and 1, in float32; then times a scale."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.normalized_shape, None, self.eps)
        y = torch.addcmul(y, y, self.weight)
        return (y if self.scale == 1.0 else y * self.scale).to(x.dtype)


def make_norm(config: ModelConfig, dim: int, wanted: bool = True) -> nn.Module:
    """Identity where none is wanted."""
    return (ShiftedNorm if config.shifted_norms else nn.RMSNorm)(dim, config.norm_eps) if wanted else nn.Identity()


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.qkv = nn.Linear(config.dim, (config.n_head + 2 * config.n_kv_head) * config.head_dim, config.qkv_bias)
        self.out = nn.Linear(config.n_head * config.head_dim, config.dim, config.out_bias)
        whole = config.qk_norm_whole
        self.q_norm = make_norm(config, config.head_dim * (config.n_head if whole else 1), config.qk_norm)
        self.k_norm = make_norm(config, config.head_dim * (config.n_kv_head if whole else 1), config.qk_norm)
        self.q_norm.scale, self.normed = config.query_scale, config.qk_norm
        self.sinks = nn.Parameter(torch.empty(config.n_head)) if config.sinks else None

    def project(self, x: Tensor) -> Tensor:
        """[B, M, dim] -> unrotated queries, keys and values [B, H + 2K, M, D]."""
        heads = self.qkv(x).view(*x.shape[:2], -1, self.head_dim)  # [B, M, H + 2K, D]
        if self.normed:
            q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], 2)
            q, k = (norm(x.reshape(*x.shape[:2], -1, *norm.normalized_shape)).view_as(x)  # a head, or all together
                    for norm, x in ((self.q_norm, q), (self.k_norm, k)))
            heads = torch.cat([q, k, v], 2)
        return heads.transpose(1, 2)

    def output(self, states: list[attention.State], dtype: torch.dtype) -> Tensor:
        """States over disjoint keys, see `attention.join` -> [B, M, dim]."""
        return self.out(attention.heads_side_by_side(attention.join(states, self.sinks), self.n_head, dtype))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, config.mlp_bias)
        self.activate = {"silu": nn.SiLU(), "gelu": nn.GELU(approximate="tanh")}[config.activation]
        self.down = nn.Linear(config.ffn_dim, config.dim, config.mlp_bias)

    def forward(self, x: Tensor, is_prefill: bool = False) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [B, M, F] each
        return self.down(self.activate(gate) * up)


class Block(nn.Module):
    """One layer. What stands before and after the reading of the cache is compiled, where that is wanted."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = Attention(config)
        self.mlp = Experts(config) if config.num_experts else MLP(config)
        self.attention_norm, self.mlp_norm = (make_norm(config, config.dim, config.pre_norm) for _ in range(2))
        self.attention_out_norm, self.mlp_out_norm = (make_norm(config, config.dim, config.post_norm) for _ in range(2))

    def forward(self, x: Tensor, kv, compiled=eager, is_prefill: bool = False) -> Tensor:
        """x [B, M, dim] -> [B, M, dim]. kv: this layer's part of a block of some cache."""
        q, states = compiled(Block.before)(self, x, kv)
        return compiled(Block.after)(self, x, states + kv.read(q), is_prefill)

    def before(self, x: Tensor, kv) -> tuple[Tensor, list]:
        """Up to the attention over the tail."""
        return kv.write(self.attention.project(self.attention_norm(x)))

    def after(self, x: Tensor, states: list, is_prefill: bool) -> Tensor:
        x = x + self.attention_out_norm(self.attention.output(states, x.dtype))
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x), is_prefill))


class Transformer(nn.Module):
    """A decoder-only transformer.

    `kv` is a block of any cache: `kv.layer(i)` has `write` and `read` (see `cache/store.py`), `kv.compiled(function)`
    is the function, compiled or as it is.
    """

    group = None  # the ranks that share the model, see parallel.py

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.rope = RotaryEmbedding(config)
        # With a weight of its own, PyTorch makes no random numbers: on the meta device it would import its compiler.
        self.embedding = nn.Embedding(config.vocab_rows, config.dim, _weight=torch.empty(config.vocab_rows, config.dim))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config, config.dim)
        self.output = nn.Linear(config.dim, config.vocab_rows, bias=False)
        if config.tie_word_embeddings:
            self.output.weight = self.embedding.weight
        if config.float8 is not None:
            fp8.put_in(self)

    def embed(self, tokens: Tensor) -> Tensor:
        x, scale = self.embedding(tokens), self.config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype).item()  # rounded as the weights are

    def forward(self, tokens: Tensor, kv) -> Tensor:
        """tokens [B, M] -> hidden states [B, M, dim], normalised, ready for `output`."""
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, kv.layer(i), kv.compiled)
        return self.norm(x)

    def prefill(self, tokens: Tensor, blocks: list[tuple[int, int, object]], on_progress=None,
                cache_only: bool = False) -> Tensor | None:
        """Runs a long stretch of tokens layer by layer: all chunks through layer 0, then layer 1, and so on.

        So a layer's keys are complete, and still in the caches of the processor, before the next layer begins.

        Args:
            tokens: [B, S].
            blocks: (start, stop, kv) per chunk, in order.
            on_progress: called with the share of the work that is done, 0 to 1.
            cache_only: of the last layer, nothing is wanted but keys and values; most of its work is left out.

        Returns:
            hidden states [B, S, dim], normalised; None with `cache_only`.
        """
        x = self.embed(tokens)
        work = sum(stop * stop - start * start for start, stop, _ in blocks) * len(self.layers)
        done = 0
        for i, layer in enumerate(self.layers):
            for start, stop, kv in blocks:
                if cache_only and i == len(self.layers) - 1:
                    part = kv.layer(i)
                    part.close(layer.before(x[:, start:stop], part)[0])
                else:
                    x[:, start:stop] = layer(x[:, start:stop], kv.layer(i), is_prefill=True)
                done += stop * stop - start * start
                if on_progress is not None:
                    on_progress(done / work)
        return None if cache_only else self.norm(x)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def dtype_name(self) -> str:
        """For people."""
        return str(self.dtype).removeprefix("torch.") + ("" if self.config.float8 is None else " with weights in fp8")

    @property
    def weight_bytes(self) -> int:
        """Of what a step reads, or where experts are chosen, of all."""
        held = {id(x): x.nbytes for name, x in (*self.named_parameters(), *self.named_buffers()) if name[:5] != "rope."}
        return sum(held.values()) + sum(getattr(module, "packed_bytes", 0) for module in self.modules())

    @classmethod
    def empty(cls, config: ModelConfig, device, dtype: torch.dtype) -> "Transformer":
        """The model with uninitialised parameters, each allocated once, in its final dtype, on its final device."""
        with torch.device("meta"):
            model = cls(config)
        for name, parameter in list(model.named_parameters()):  # a tied weight is listed once
            owner, _, attribute = name.rpartition(".")
            as_it_is = attribute == "scale" or parameter.dtype == FP8
            data = torch.empty(parameter.shape, dtype=parameter.dtype if as_it_is else dtype, device=device)
            setattr(model.get_submodule(owner), attribute, nn.Parameter(data, requires_grad=False))
        if config.tie_word_embeddings:
            model.output.weight = model.embedding.weight
        model.rope.to(device)
        fp8.place(model, device)
        for layer in model.layers if config.num_experts else ():
            layer.mlp.is_grouped = has_grouped_product(torch.device(device), dtype)
        if torch.device(device).type == "cpu":
            cpu.adapt(model)
        return model.eval()

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0, device="cpu", dtype=torch.float32, std: float = 0.02):
        """A model with seeded normal weights: for tests and for benchmarks of a shape without its checkpoint."""
        model = cls.empty(config, device, dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0, std, generator=generator)
        return model
