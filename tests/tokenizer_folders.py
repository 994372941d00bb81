"""Tokenizer folders of every kind, small and trained in a moment but laid out as published, and 200 texts to encode.
Knows nothing of what is tested with them."""

import json
import random

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from triforce.hf.vocabulary import merges_of, read_sentencepiece

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
# Of gpt-oss: words end before a capital.
WORD = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
OSS_SPLIT = (WORD % ("*", "+") + WORD % ("+", "*")
             + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CORPUS = ["The quick brown fox jumps over the lazy dog and runs.", "for i in range(10):\n    print(i, 'times')\n\n",
          "日本語のテキストと中文文本", "Ünïcödé naïve café ﬁne", "Привет, мир! Как дела?",
          "one two  three   four    five",
          "12345 67890 3.14159", "hello world, hello there, hello again\tand\tagain", "🙂🙃 emoji 👩‍👩‍👧 family"] * 8
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
THINKING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou have tools.\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}{% if message.content is string %}"
    "{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>{{ content }}</tool_response>{% else %}{{ content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
LLAMA2_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant may speak, not ' + message['role']) }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{% set content = ' ' + message['content'] %}{{ content + eos_token }}{% endgeneration %}"
    "{{ content }}{% endif %}{% endfor %}")


def strings() -> list[str]:
    """200 texts: hand-picked corners, then random mixtures of them."""
    picked = [
        "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "a", " a", "a ", "  a  ", "\ta\t", "\na\n",
        "Hello world", " Hello world", "Hello  world   again", "hello\nworld", "x" * 40, "日本語", "中文文本",
        " 中文 文本 ", "한국어 텍스트", "Привет, мир", "مرحبا بالعالم", "שלום", "🙂", "🙂🙃", "👩‍👩‍👧",
        "🏳️‍🌈 flag", "a🙂b", "é", "e\u0301", "ﬁne", "Å\u030a", "\u0301", "o\u0302\u0323", "ｆｕｌｌ", "½ ²",
        "<s>", "</s>", "<unk>", "<s>a", "a<s>", "a<s>b", " <s> a </s> b", "</s></s>", "<s> a", "<|eot_id|>",
        "a<|eot_id|>b", "<|begin_of_text|>hi", "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<extra>",
        "a <extra> b", "<pad>", "▁", "▁a", "a▁b", "▁▁", "<0x0A>", "<0x41>", "\x00", "\x01\x02", "\x7f",
        "\ufeffbom", "\u200b", "\u00a0nbsp\u00a0", "\u2028", "\ufffd", "a\ufffdb", "1", "12", "1234567890",
        "3.14159", "1,000,000", "0x1F", "don't we'll I'M", "for i in range(10):\n    print(i)",
        "[INST] hi [/INST]", "<<SYS>>\nx\n<</SYS>>", "▁<PRE> x ▁<SUF>", "<FILL_ME>", "http://a.b/c?d=e&f=g#h",
        "\\n", "{\"a\": [1, 2]}", "¿Qué?", "naïve café", "𝔘𝔫𝔦", "\U0010ffff", "zz�",
    ]
    rng, corners = random.Random(0), list(picked)
    while len(picked) < 200:
        picked.append("".join(rng.choices(corners, k=rng.randint(2, 6))))
    return picked


def write_json(path, content):
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def sentencepiece_folder(folder, config, user_defined=()):
    """A folder as Llama 2's before tokenizer.json: tokenizer.model and a config."""
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(folder / "tokenizer"), vocab_size=480, model_type="bpe",
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", split_digits=True,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, minloglevel=2,
        user_defined_symbols=list(user_defined), hard_vocab_limit=False)
    (folder / "tokenizer.vocab").unlink()
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    return folder


def byte_level_folder(folder, normalizer, special, model_type, config, post_processor=None, prefix_space=False):
    """A folder as Llama 3's or Qwen's: tokenizer.json with byte-level BPE."""
    folder.mkdir()
    # Qwen takes digits one by one.
    split = {"qwen2": SPLIT.replace("{1,3}", ""), "qwen3": SPLIT.replace("{1,3}", "")}.get(model_type, SPLIT)
    split = OSS_SPLIT if model_type == "gpt_oss" else split
    backend = Tokenizer(models.BPE(ignore_merges=model_type == "llama"))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken("<extra>", special=False), AddedToken(" ünd ", special=False, normalized=False)])
    if post_processor:
        steps = [processors.ByteLevel(trim_offsets=False), post_processor(backend)]
        backend.post_processor = processors.Sequence(steps)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "config.json", {"model_type": model_type})
    return folder


def bos_template(*tokens):
    before = " ".join(tokens)
    return lambda backend: processors.TemplateProcessing(
        single=f"{before} $A", pair=f"{before} $A {before} $B",
        special_tokens=[(token, backend.token_to_id(token)) for token in tokens])


def llama_json_folder(folder, source, config, model_type="llama"):
    """A folder as Llama 2's with its tokenizer.json, whose pipeline is the one of transformers 4."""
    folder.mkdir()
    vocab, _ = read_sentencepiece(source / "tokenizer.model")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges_of(vocab), unk_token="<unk>", fuse_unk=True,
                                   byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    phi3 = model_type == "phi3"  # of which this is no special token, and takes in spaces
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.add_tokens([AddedToken("</s>", special=not phi3, normalized=False, rstrip=phi3)])
    backend.post_processor = bos_template("<s>")(backend)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "config.json", {"model_type": model_type})
    return folder


def special(text, **options):
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **options}


def make_folders(root):
    """name -> folder, of every kind of tokenizer."""
    llama = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    made = {
        "sentencepiece, legacy": sentencepiece_folder(
            root / "legacy", {**llama, "legacy": True, "bos_token": {"__type": "AddedToken", **special("<s>")},
                              "chat_template": LLAMA2_TEMPLATE}),
        "sentencepiece, new": sentencepiece_folder(root / "new", {**llama, "legacy": False}),
        "sentencepiece, silent config": sentencepiece_folder(root / "silent", {"tokenizer_class": "LlamaTokenizer"}),
        "sentencepiece, eos, no prefix": sentencepiece_folder(
            root / "eos", {**llama, "add_eos_token": True, "add_prefix_space": False}),
        "sentencepiece, user-defined pieces": sentencepiece_folder(root / "user", llama, ["<extra>", "[INST]"]),
        "sentencepiece, tokens by id": sentencepiece_folder(root / "by_id", {
            **llama, "pad_token": "<pad>", "added_tokens_decoder": {
                "0": special("<unk>", special=True), "1": special("<s>", special=True),
                "2": special("</s>", special=True), "480": special("<extra>", normalized=True, special=False),
                "481": special("<pad>", special=True, lstrip=True)}}),
    }
    made["sentencepiece, old token files"] = sentencepiece_folder(root / "old", llama)
    write_json(root / "old/added_tokens.json", {"<extra>": 480, "<pad>": 481})
    write_json(root / "old/special_tokens_map.json", {
        "bos_token": special("<s>", normalized=True), "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
        "additional_special_tokens": ["<|eot_id|>"]})
    sp = root / "legacy"
    made |= {
        "Llama's tokenizer.json, legacy": llama_json_folder(root / "json_legacy", sp, {**llama, "legacy": True}),
        "Llama's tokenizer.json, new": llama_json_folder(
            root / "json_new", sp, {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "pad_token": "<pad>"}),
        "Mistral's tokenizer.json": llama_json_folder(root / "mistral", sp, {**llama, "legacy": False}, "mistral"),
        "Phi-3's tokenizer.json": llama_json_folder(
            root / "phi3", sp, {**llama, "legacy": False, "bos_token": "<s>", "eos_token": "</s>"}, "phi3"),
        "CodeLlama": llama_json_folder(root / "code", sp, {
            **llama, "tokenizer_class": "CodeLlamaTokenizer", "legacy": None, "prefix_token": "▁<PRE>",
            "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"}),
        "Llama 3": byte_level_folder(
            root / "llama3", None,
            ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], "llama",
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
             "clean_up_tokenization_spaces": True, "chat_template": LLAMA3_TEMPLATE},
            bos_template("<|begin_of_text|>")),
        "special tokens are text": byte_level_folder(
            root / "split", None, ["<|begin_of_text|>", "<|eot_id|>"], "llama",
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot_id|>", "split_special_tokens": True}),
        "Qwen": byte_level_folder(
            root / "qwen", normalizers.NFC(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "qwen2",
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>",
             "pad_token": "<|endoftext|>", "add_bos_token": False}),
        "Qwen3": byte_level_folder(
            root / "qwen3", normalizers.NFC(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "qwen3",
            {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "unk_token": None,
             "pad_token": "<|endoftext|>", "add_bos_token": False, "add_prefix_space": False, "errors": "replace",
             "split_special_tokens": False, "chat_template": THINKING_TEMPLATE}),
        "GLM-4": byte_level_folder(
            root / "glm", None, ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>"], "glm",
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
             "pad_token": "<|endoftext|>", "padding_side": "left"}, bos_template("[gMASK]", "<sop>")),
        "gpt-oss": byte_level_folder(
            root / "oss", None, ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>"],
            "gpt_oss", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|startoftext|>",
                        "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}),
        "OLMo 3": byte_level_folder(
            root / "olmo3", normalizers.NFC(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"], "olmo3",
            {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>",
             "unk_token": "<|endoftext|>", "pad_token": "<|pad|>", "add_prefix_space": False}),
        "normalising": byte_level_folder(
            root / "nfkc", normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), ["<s>", "</s>"],
            "llama", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                      "pad_token": "<pad>"},
            prefix_space=True),
    }
    return made


STRINGS = strings()
