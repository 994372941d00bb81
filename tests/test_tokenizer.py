"""The tokenizer against transformers' AutoTokenizer on the same folders: ids, text, chat; and streams against decode.
Knows nothing of models."""

import json
import random
import shutil
import threading
import time

import pytest
import sentencepiece
from conftest import refused
from tokenizer_folders import CORPUS, STRINGS, make_folders, special, write_json
from transformers import AutoTokenizer

from triforce.hf.folders import TINY
from triforce.hf.tokenizer import BYTE_PIECE, Tokenizer
from triforce.hf.vocabulary import merges_of, read_sentencepiece

NAMES = ["sentencepiece, legacy", "sentencepiece, new", "sentencepiece, silent config", "sentencepiece, eos, no prefix",
         "sentencepiece, user-defined pieces", "sentencepiece, tokens by id", "sentencepiece, old token files",
         "Llama's tokenizer.json, legacy", "Llama's tokenizer.json, new", "Mistral's tokenizer.json", "CodeLlama",
         "Phi-3's tokenizer.json", "Llama 3", "special tokens are text", "Qwen", "Qwen3", "GLM-4", "normalising",
         "gpt-oss", "OLMo 3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="module")
def pair(folders):
    """name -> (ours, transformers'), each made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = Tokenizer(folders[name]), AutoTokenizer.from_pretrained(folders[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(pair, name):
    ours, theirs = pair(name)
    for text in STRINGS:
        if name == "CodeLlama" and "<FILL_ME>" in text:
            continue  # transformers turns it into an infilling prompt; here it is a token like any other
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, repr(text)
        assert ours.encode(text, bos=False) == theirs.encode(text, add_special_tokens=False), repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)
    assert ours.bos_id == theirs.bos_token_id and ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    # Every id is decoded after others. Runs of byte pieces are left out, see `Tokenizer`.
    rng, ids = random.Random(1), [i for i, token in ours.token_of.items() if not BYTE_PIECE.fullmatch(token)]
    for _ in range(60):
        some = rng.choices(ids, k=12)
        assert ours.decode(some) == theirs.decode(some, skip_special_tokens=True)
    assert ours.decode([ours.vocab_size + 5]) == ""  # padding of the model's vocabulary


@pytest.mark.parametrize("name", NAMES)
def test_streamed_pieces_join_to_the_whole(pair, name):
    ours, _ = pair(name)
    rng = random.Random(2)
    random_ids = [[rng.randrange(ours.vocab_size + 3) for _ in range(50)] for _ in range(30)]
    for ids in [ours.encode(text) for text in STRINGS] + random_ids:
        for continues in (False, True):
            stream, pieces = ours.stream(continues), []
            at = 0
            while at < len(ids):
                step = rng.randint(0, 3)
                pieces.append(stream.push(ids[at:at + step]))
                at += step
            assert "".join(pieces) + stream.finish() == ours.decode(ids, continues)


def test_a_stream_gives_whole_characters_as_soon_as_they_are(pair):
    """Invalid bytes do not take their neighbours along."""
    for name in ("sentencepiece, new", "Llama 3"):
        ours, _ = pair(name)
        text = "中🙂é\n𝔘 a"
        stream = ours.stream()
        pieces = [stream.push([i]) for i in ours.encode(text)]
        assert "".join(pieces) == text and stream.finish() == "" and "\ufffd" not in text
        assert len([piece for piece in pieces if piece]) >= 5
    ours, _ = pair("sentencepiece, new")
    newline, lone = (ours.backend.token_to_id(f"<0x{byte:02X}>") for byte in (0x0A, 0xE6))
    stream = ours.stream()
    assert [stream.push([i]) for i in (newline, lone, newline)] == ["\n", "", "\ufffd\n"]
    assert stream.push([lone]) + stream.finish() == "\ufffd"


def test_text_that_continues_keeps_its_space(pair):
    ours, _ = pair("sentencepiece, new")
    tail = ours.encode("Hello world", bos=False)[1:]
    tail = [i for i in tail if ours.token_of[i].startswith("▁")][-1]
    assert ours.decode([tail]) == ours.decode([tail], continues=True)[1:] != ""


@pytest.mark.parametrize("name", ["sentencepiece, legacy", "Llama 3"])
def test_chat_equals_transformers(pair, name):
    ours, theirs = pair(name)
    messages = [{"role": "user", "content": " Hi there, 日本! "}, {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "And <s>?", "name": None}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.apply_chat_template(messages) == expected
    assert expected.count(ours.bos_id) == {"Llama 3": 1, "sentencepiece, legacy": 3}[name]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALLED = [{"role": "user", "content": "How is Kyōto?"},
          {"role": "assistant", "content": "<think>\nI look.\n</think>\n\nI look.", "tool_calls": [
              {"type": "function", "function": {"name": "weather", "arguments": {"city": "Kyōto"}}}]},
          {"role": "assistant", "content": None, "tool_calls": [
              {"type": "function", "function": {"name": "weather", "arguments": {}}}]},
          {"role": "tool", "content": "18 °C"}]


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"enable_thinking": False}, {"tools": TOOLS},
                                       {"tools": TOOLS, "enable_thinking": False}], ids=str)
def test_what_a_template_reads_besides_the_messages(pair, variables):
    """The switch for thinking, and tools, of which templates write the calls and the answers as they like."""
    ours, theirs = pair("Qwen3")
    found = set()
    for messages in (CALLED, CALLED[:1]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)
        assert ours.apply_chat_template(messages, variables=variables) == expected
        found.add("<think>" in ours.decode(expected))
    assert found == {variables.get("enable_thinking") is False}


def test_chat_templates_from_files_and_arguments(folders, tmp_path):
    folder = shutil.copytree(folders["Qwen"], tmp_path / "chat")
    ours = Tokenizer(folder)
    messages = [{"role": "user", "content": "hi 日"}]
    refused("--chat-template", ours.apply_chat_template, messages)
    assert ours.apply_chat_template(messages, "{{ messages | tojson }}") == ours.encode(json.dumps(
        messages, ensure_ascii=False))
    assert ours.apply_chat_template(messages, "{{ strftime_now('%Y')[:2] }}") == ours.encode("20")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**config, "chat_template": "from config"})
    assert ours.apply_chat_template(messages) == ours.encode("from config")
    (folder / "chat_template.jinja").write_text("from jinja")
    assert ours.apply_chat_template(messages) == ours.encode("from jinja")
    for broken in ("{{ raise_exception('no system') }}", "{{ 1 / 0 }}", "{{ range(10**9) }}",
                   "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
                   "{{ ''.__class__.__mro__[1].__subclasses__() }}"):  # the sandbox holds
        refused("rejects the messages: ", ours.apply_chat_template, messages, broken)
    for bad in ([], ["hi"], [{"content": "x"}]):
        refused("role", ours.apply_chat_template, bad, "x")


def changed(source, folder, **config):
    """A copy of a folder with other values in its tokenizer_config.json."""
    shutil.copytree(source, folder)
    before = json.loads((source / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**before, **config})
    return folder


@pytest.mark.parametrize("config", [
    {"image_token": "<img>"}, {"image_token": {"__type": "AddedToken", **special("<img>")}},
    {"extra_special_tokens": {"audio_token": "<aud>", "turn": "<|eot_id|>"}},
    {"extra_special_tokens": ["<one>", "<two>"]}, {"additional_special_tokens": ["<one>"], "extra_special_tokens": {}},
    {"extra_special_tokens": {"a": "<two>"}, "image_token": "<img>"}], ids=str)
@pytest.mark.parametrize("name", ["Llama 3", "sentencepiece, new", "Qwen3", "Llama's tokenizer.json, new"])
def test_tokens_with_names_of_their_own_equal_transformers(folders, tmp_path, name, config):
    folder = changed(folders[name], tmp_path / "named", **config)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    text = "a <img> <aud><one><two> <|eot_id|> b"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    template = "{{ image_token }}{{ audio_token }}{{ turn }}{{ a }}{{ eos_token }}"
    messages = [{"role": "user", "content": "x"}]
    assert ours.apply_chat_template(messages, template) == theirs.apply_chat_template(
        messages, chat_template=template, return_dict=False)


@pytest.mark.parametrize("layout", ["list", "files"])
def test_the_template_for_tools_is_chosen_as_in_transformers(folders, tmp_path, layout):
    templates = {"default": "plain{{ tools }}", "tool_use": "used {{ tools | tojson }}", "rag": "rag"}
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    folder = changed(folders["Qwen3"], tmp_path / "tools", chat_template=listed)
    if layout == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text("of a file {{ tools | tojson }}")
        (folder / "chat_template.jinja").write_text("plain")
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    said, messages = [], [{"role": "user", "content": "x"}]
    for tools in (None, [], TOOLS):
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(messages, variables={"tools": tools}) == expected
        said.append(ours.decode(expected).split()[0])
    assert said == {"list": ["plainNone", "used", "used"], "files": ["plain", "of", "of"]}[layout]


def test_same_as(pair, folders, tmp_path):
    legacy, new, qwen = (pair(name)[0] for name in ("sentencepiece, legacy", "sentencepiece, new", "Qwen"))
    assert legacy.same_as(new) is None
    assert "id 0 means '<unk>' and '!'" in legacy.same_as(qwen)
    padded = shutil.copytree(folders["sentencepiece, new"], tmp_path / "padded")
    write_json(padded / "added_tokens.json", {"<pad>": new.vocab_size})  # beyond what the model's vocabulary holds
    write_json(padded / "config.json", {"vocab_size": new.vocab_size})
    other = Tokenizer(padded)
    assert other.vocab_size == new.vocab_size + 1 and other.same_as(new) is None
    write_json(padded / "config.json", {"vocab_size": new.vocab_size + 64})
    assert f"id {new.vocab_size} means '<pad>' and nothing" in other.same_as(new)
    assert f"id {new.vocab_size} means nothing and '<pad>'" in new.same_as(other)


def test_tokenizer_faults(folders, tmp_path):
    model = (folders["sentencepiece, new"] / "tokenizer.model").read_bytes()
    for name, content, words in (
            (None, None, "neither tokenizer.json nor tokenizer.model"),
            ("tokenizer.model", model[:3000], "truncated or no sentencepiece"),
            ("tokenizer.model", b"IQ== 0\nIg== 1\n", "sentencepiece"),  # the form of Llama 3's original folder
            ("tokenizer.json", b'{"model": {"type": "BPE"', "cannot be read"),
            ("tokenizer.json", b'{"model": {"type": "new"}}', "cannot be read")):
        if name is not None:
            (tmp_path / name).write_bytes(content)
        refused(words, Tokenizer, tmp_path)
    for text in ("a\ud800", 3):
        refused("surrogate", Tokenizer(folders["Qwen"]).encode, text)


@pytest.mark.parametrize("part, value, words", [
    ("model", {"continuing_subword_prefix": "a prefix longer than any token"}, "cannot be read"),
    ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                        "pair": [], "special_tokens": {}}, "fails on the text")])
def test_a_panic_of_the_library_is_one_line(folders, tmp_path, part, value, words):
    """It is a BaseException, and no Exception."""
    folder = shutil.copytree(folders["Mistral's tokenizer.json"], tmp_path / "broken")
    content = json.loads((folder / "tokenizer.json").read_text())
    content[part] = {**content[part], **value} if part == "model" else value
    write_json(folder / "tokenizer.json", content)
    refused(words, lambda: Tokenizer(folder).encode("hello"))


def test_only_bpe_is_read_from_a_sentencepiece_model(tmp_path):
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / kind), vocab_size=120, model_type=kind,
            user_defined_symbols=["<extra>", "q", "he"], control_symbols=["<mask>"], hard_vocab_limit=False,
            minloglevel=2)
    vocab, added = read_sentencepiece(tmp_path / "bpe.model")
    assert list(vocab.values()) == list(range(len(vocab))) and len(vocab) > 100
    assert {token.content: token.special for token in added} == {
        "<s>": True, "</s>": True, "<mask>": True, "<extra>": False, "q": False, "he": False}
    refused("is a unigram model", read_sentencepiece, tmp_path / "unigram.model")


def test_merges_of_a_piece_of_many_characters():
    vocab = {piece: i for i, piece in enumerate(["a", "b", "ab", "ba", "aba", "c" * 200_000])}
    begun = time.perf_counter()
    assert merges_of(vocab) == [("a", "b"), ("b", "a"), ("a", "ba"), ("ab", "a")]
    assert time.perf_counter() - begun < 1


def test_other_threads_run_while_a_book_is_encoded():
    """As reading weights and the warm-up do, in the command line."""
    tokenizer, turns = Tokenizer(TINY / "target"), 0
    thread = threading.Thread(target=tokenizer.encode, args=("It is a truth universally acknowledged. " * 20_000,))
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 10
