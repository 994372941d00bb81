"""What vocabularies are read from, where a tokenizer as a whole does not show it."""

import time

import pytest
import sentencepiece
from tokenizer_folders import CORPUS

from triforce.errors import UserError
from triforce.hf.vocabulary import merges_of, read_sentencepiece


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_only_bpe_is_read_from_a_sentencepiece_model(tmp_path, kind):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / kind), vocab_size=120, model_type=kind,
        user_defined_symbols=["<extra>", "q", "he"], control_symbols=["<mask>"], hard_vocab_limit=False, minloglevel=2)
    path = tmp_path / f"{kind}.model"
    if kind == "bpe":
        vocab, added = read_sentencepiece(path)
        assert list(vocab.values()) == list(range(len(vocab))) and len(vocab) > 100
        assert {token.content: token.special for token in added} == {
            "<s>": True, "</s>": True, "<mask>": True, "<extra>": False, "q": False, "he": False}
    else:
        with pytest.raises(UserError, match="is a unigram model"):
            read_sentencepiece(path)


def test_merges_of_a_piece_of_many_characters():
    vocab = {piece: i for i, piece in enumerate(["a", "b", "ab", "ba", "aba", "c" * 200_000])}
    begun = time.perf_counter()
    assert merges_of(vocab) == [("a", "b"), ("b", "a"), ("a", "ba"), ("ab", "a")]
    assert time.perf_counter() - begun < 1
