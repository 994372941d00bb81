"""Builds the encoder of a checkpoint folder: its `tokenizers` pipeline, from tokenizer.json or from tokenizer.model.

The result encodes as transformers' AutoTokenizer (version 5) does for the same folder, which is not always what the
files say alone: a LlamaTokenizer's spaces are handled by its class, whatever tokenizer.json holds. It knows nothing of
chat, of streams, or of the model.
"""

import contextlib
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from ..errors import UserError
from .files import check_file, read_json, read_optional_json

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LLAMA_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CODE_LLAMA_DEFAULTS = {"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>",
                       "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"}


def build_backend(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The pipeline of a folder and its named special tokens, such as {"bos_token": "<s>", "eos_token": "</s>"}."""
    config = read_optional_json(folder / "tokenizer_config.json")
    model_config = read_optional_json(folder / "config.json")
    declared = (config.get("tokenizer_class") or model_config.get("tokenizer_class") or "").removesuffix("Fast")
    code_llama = declared == "CodeLlamaTokenizer"
    json_path, model_path = folder / "tokenizer.json", folder / "tokenizer.model"
    content, extra = {}, []
    if json_path.exists():
        content = read_json(json_path)
        # transformers takes a Mistral's and a byte-level tokenizer.json as they are, but rebuilds a Llama's.
        own = "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        own = own or model_config.get("model_type") == "mistral" or content.get("model", {}).get("type") != "BPE"
        as_llama = declared in ("LlamaTokenizer", "CodeLlamaTokenizer") and not own
        backend = Tokenizer.from_file(str(json_path))
        if as_llama:
            model, post_processor = content["model"], backend.post_processor
            merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
            backend = llama_pipeline(model["vocab"], merges, config, code_llama)
            backend.post_processor = post_processor
    elif declared == "ChatGLM4Tokenizer":  # its tokenizer.model is not sentencepiece's
        raise UserError(f"{folder} has the tokenizer_class ChatGLM4Tokenizer, which is code; add the tokenizer.json "
                        "and tokenizer_config.json of the same model's transformers layout (its name ends in -hf)")
    elif model_path.exists():
        as_llama = True
        vocab, extra = read_sentencepiece(model_path)
        backend = llama_pipeline(vocab, merges_of(vocab), config, code_llama)
    else:
        raise UserError(f"{folder} has neither tokenizer.json nor tokenizer.model; download the checkpoint again")
    backend.no_truncation()
    backend.no_padding()
    special = add_tokens(backend, folder, config, content.get("added_tokens", []), extra, as_llama, code_llama)
    # tokenizer.json says itself which ids it puts around a text; tokenizer.model leaves it to the config.
    if code_llama or not json_path.exists():
        surround(backend, special, config.get("add_bos_token", code_llama), config.get("add_eos_token", False))
    return backend, special


def llama_pipeline(vocab: dict[str, int], merges: list[tuple], config: dict, code_llama: bool) -> Tokenizer:
    """Byte-fallback BPE over words joined by "▁". A text gets a "▁" in front: once, or (legacy) after every special
    token too."""
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True,
                            unk_token="<unk>" if code_llama else None))
    prefix_space = config.get("add_prefix_space") in (None, True)
    scheme = "never" if not prefix_space else "always" if config.get("legacy") and not code_llama else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space or code_llama:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_of(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE vocabulary, which stores none: a piece is made of any two others, and pieces
    are listed in the order in which training merged them."""
    lengths = sorted({len(piece) for piece in vocab})  # a piece of many characters is cut where a half may be known
    return [(piece[:i], piece[i:]) for piece in vocab for i in lengths
            if i < len(piece) and piece[:i] in vocab and piece[i:] in vocab]


def add_tokens(backend: Tokenizer, folder: Path, config: dict, from_json: list, extra: list, as_llama: bool,
               code_llama: bool) -> dict[str, str]:
    """Registers added and special tokens; text that spells one is never split. Returns the named special tokens.

    Ids: a token that the vocabulary has keeps its id, others are numbered on from its end, in this order: those listed
    by id, the named ones, the rest.
    """
    named = {**(LLAMA_DEFAULTS if as_llama else {}), **(CODE_LLAMA_DEFAULTS if code_llama else {}),
             **named_tokens(config)}
    listed: dict[int, AddedToken] = {}
    rest = config.get("extra_special_tokens")
    if not rest or isinstance(rest, dict):  # whose names are told above
        rest = extra if rest and extra else config.get("additional_special_tokens")
    if "added_tokens_decoder" in config:
        listed = {int(i): added_token(token) for i, token in config["added_tokens_decoder"].items()}
    else:
        special_map = read_optional_json(folder / "special_tokens_map.json")
        named.update(named_tokens(special_map))
        if rest is None and not extra:
            rest = special_map.get("additional_special_tokens")
        special = {text_of(token) for token in [*named.values(), *(rest or [])] if token}
        for text, i in read_optional_json(folder / "added_tokens.json").items():
            listed[i] = AddedToken(text, normalized=text not in special, special=text in special)
        for token in from_json:
            listed[token["id"]] = added_token(token)
    if rest is None:
        rest = extra
    by_text = {token.content: token for token in listed.values()}
    named = {name: by_text.get(text_of(token), token) for name, token in named.items() if token}
    names = {text_of(token) for token in named.values()}
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | set(by_text)
    tokens = [listed[i] for i in sorted(listed)]
    for token in [*named.values(), *(rest or [])]:
        if token and text_of(token) not in known:
            known.add(text_of(token))
            tokens.append(added_token(token))
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens(tokens)
    return {name: text_of(token) for name, token in named.items()}


def named_tokens(config: dict) -> dict:
    """The special tokens that have a name: a usual one, another that ends in `_token`, or one of their own."""
    extra = config.get("extra_special_tokens")
    named = {name: token for name, token in config.items() if name in SPECIAL_NAMES or name.endswith("_token")
             and (isinstance(token, str) or isinstance(token, dict) and "__type" in token)}
    return named | (extra if isinstance(extra, dict) else {})


def text_of(token) -> str:
    return token["content"] if isinstance(token, dict) else token if isinstance(token, str) else token.content


def added_token(token) -> AddedToken:
    """From any of its spellings: a string (special), a dict of options, or itself."""
    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    options = {key: token[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in token}
    return AddedToken(token["content"], **options)


def surround(backend: Tokenizer, special: dict[str, str], add_bos: bool, add_eos: bool) -> None:
    """Makes encoding put bos before and eos after a text, where asked for."""
    around = [special.get("bos_token") if add_bos else None, special.get("eos_token") if add_eos else None]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around) if token]
    single = " $A:0 ".join(f"{token}:0" if token else "" for token in around).strip()
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ids)


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
    if not _is_bpe(model):
        raise UserError(f"{path} is a sentencepiece model of another kind than BPE; use a checkpoint with a "
                        "tokenizer.json")
    own = [(piece, model.is_control(i)) for piece, i in vocab.items() if model.is_control(i) or
           not (model.is_unknown(i) or model.is_byte(i) or model.is_unused(i)) and _is_whole(model, piece, i)]
    return vocab, [AddedToken(piece, normalized=False, special=special) for piece, special in own]


def _is_bpe(model) -> bool:
    """The package does not tell a model's kind. Of the four, BPE alone draws encodings and cannot list the best."""
    draws = False
    with contextlib.suppress(RuntimeError):
        draws = bool(model.sample_encode_as_pieces("a", -1, 0.5))
        model.nbest_encode_as_pieces("a", 2)
        return False
    return draws


def _is_whole(model, piece: str, i: int) -> bool:
    """Whether a user defined a piece, which the package does not tell either: no training gave it a score, as it gave
    none to the first merge, and it stays whole where every merge is dropped (a probability of 1)."""
    return model.get_score(i) == 0 and model.sample_encode_as_pieces(piece, -1, 1.0)[-1] == piece
