"""Builds the encoder of a checkpoint folder: its `tokenizers` pipeline, from tokenizer.json or from tokenizer.model.

The result encodes as transformers' AutoTokenizer (version 5) does for the same folder, which is not always what the
files say alone: a LlamaTokenizer's spaces are handled by its class, whatever tokenizer.json holds. Of other classes
tokenizer.json alone counts here; transformers builds Qwen2's, GPT-2's and Gemma's anew, too.
"""

import contextlib
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from ..errors import UserError
from .files import check_file, read_json, read_optional_json

LLAMA_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def build_backend(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The pipeline of a folder and its named special tokens, such as {"bos_token": "<s>", "eos_token": "</s>"}."""
    config = read_optional_json(folder / "tokenizer_config.json")
    json_path, model_path = folder / "tokenizer.json", folder / "tokenizer.model"
    if json_path.exists():
        content, defaults = read_json(json_path), {}
        backend = Tokenizer.from_file(str(json_path))
        if is_rebuilt(content, config, folder):
            merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge)
                      for merge in content["model"]["merges"]]
            rebuilt = llama_pipeline(content["model"]["vocab"], merges, config)
            rebuilt.post_processor, backend, defaults = backend.post_processor, rebuilt, LLAMA_DEFAULTS
        special = add_tokens(backend, folder, config, content.get("added_tokens", []), [], defaults)
    elif model_path.exists():
        vocab, extra = read_sentencepiece(model_path)
        backend = llama_pipeline(vocab, merges_of(vocab), config)
        special = add_tokens(backend, folder, config, [], extra, LLAMA_DEFAULTS)
        surround(backend, special, config)
    else:
        raise UserError(f"{folder} has neither tokenizer.json nor tokenizer.model; download the checkpoint again")
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))  # as text
    backend.no_truncation()
    backend.no_padding()
    return backend, special


def surround(backend: Tokenizer, special: dict[str, str], config: dict) -> None:
    """Makes encoding put bos before and eos behind a text, where the config asks for it."""
    around = [special.get(f"{name}_token") if config.get(f"add_{name}_token") else None for name in ("bos", "eos")]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around) if token]
    single = " $A:0 ".join(f"{token}:0" if token else "" for token in around).strip()
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ids)


def is_rebuilt(content: dict, config: dict, folder: Path) -> bool:
    """Whether transformers rebuilds what a tokenizer.json says: a Llama's, but no byte-level one, nor of `own`."""
    model = read_optional_json(folder / "config.json")
    declared = (config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    own = ("mistral", "ministral", "phi3", "glm", "olmo3")
    if declared not in ("LlamaTokenizer", "CodeLlamaTokenizer") or model.get("model_type") in own:
        return False
    byte_level = "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    return not byte_level and content["model"].get("type") == "BPE"


def llama_pipeline(vocab: dict[str, int], merges: list[tuple], config: dict) -> Tokenizer:
    """Byte-fallback BPE over words joined by "▁". A text gets a "▁" in front: once, or (legacy) after every special
    token too."""
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    prefix_space = config.get("add_prefix_space") in (None, True)
    scheme = "never" if not prefix_space else "always" if config.get("legacy") else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_of(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece vocabulary, which lists pieces in the order in which training merged them."""
    lengths = sorted({len(piece) for piece in vocab})  # a piece of many characters is cut where a half may be known
    return [(piece[:i], piece[i:]) for piece in vocab for i in lengths
            if i < len(piece) and piece[:i] in vocab and piece[i:] in vocab]


def add_tokens(backend: Tokenizer, folder: Path, config: dict, from_json: list, extra: list,
               defaults: dict[str, str]) -> dict[str, str]:
    """Registers added and special tokens; text that spells one is never split. Returns the named special tokens.

    Ids: a token that the vocabulary has keeps its id, others are numbered on from its end, in this order: those listed
    by id, the named ones, the rest.

    Args:
        from_json: of tokenizer.json. extra: of tokenizer.model. defaults: names that the config may leave out.
    """
    if "added_tokens_decoder" in config:
        named = named_tokens(config)
        by_id = {int(i): added_token(token) for i, token in config["added_tokens_decoder"].items()}
    else:  # as before version 4.34 of transformers
        named = named_tokens(config) | named_tokens(read_optional_json(folder / "special_tokens_map.json"))
        older = read_optional_json(folder / "added_tokens.json")
        by_id = {i: AddedToken(text, normalized=False) for text, i in older.items()}
        by_id.update({token["id"]: added_token(token) for token in from_json})
    named = {name: added_token(token) for name, token in {**defaults, **named}.items() if token}
    more = config.get("extra_special_tokens")
    more = more if more and isinstance(more, list) else config.get("additional_special_tokens") or []
    rest = [added_token(token) for token in more]
    special = {token.content for token in [*named.values(), *rest]}
    tokens = [by_id[i] for i in sorted(by_id)]
    known = {token.content for token in [*tokens, *backend.get_added_tokens_decoder().values()]}
    tokens += [token for token in [*named.values(), *rest, *extra] if token.content not in known]
    for token in tokens:
        token.special = token.special or token.content in special
    backend.add_tokens(tokens)
    return {name: token.content for name, token in named.items()}


def named_tokens(config: dict) -> dict:
    """The special tokens that have a name, which ends in `_token`, or is one of their own."""
    extra = config.get("extra_special_tokens")
    named = {name: token for name, token in config.items() if name.endswith("_token")
             and (isinstance(token, str) or isinstance(token, dict) and "content" in token)}
    return named | (extra if isinstance(extra, dict) else {})


def added_token(token: str | dict) -> AddedToken:
    """A special token by its text, or any by its options."""
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    options = {key: token[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in token}
    return AddedToken(token["content"], **options)


def read_sentencepiece(path: Path) -> tuple[dict[str, int], list[AddedToken]]:
    """Of a sentencepiece BPE model: the ids of its pieces, and the pieces that a text is never merged into: control
    symbols, which are special, and those that a user defined."""
    from sentencepiece import SentencePieceProcessor

    check_file(path)
    try:
        model = SentencePieceProcessor(model_file=str(path))
        vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{path} is truncated or no sentencepiece model ({error}); download it again") from None
    # The package tells neither a model's kind nor what a user defined. A unigram model alone can list the best two
    # encodings. A user's piece has no score from training, as the first merge has none, and it stays whole where every
    # merge is dropped (a probability of 1).
    with contextlib.suppress(RuntimeError):
        model.nbest_encode_as_pieces("a", 2)
        raise UserError(f"{path} is a unigram model, and BPE is supported; use a checkpoint with a tokenizer.json")
    control = [piece for piece, i in vocab.items() if model.is_control(i)]
    own = [piece for piece, i in vocab.items() if model.get_score(i) == 0 and not (
        model.is_control(i) or model.is_unknown(i) or model.is_byte(i) or model.is_unused(i))
        and model.sample_encode_as_pieces(piece, -1, 1.0)[-1] == piece]
    return vocab, [*map(added_token, control), *(AddedToken(piece, normalized=False) for piece in own)]
