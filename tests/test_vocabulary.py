"""What vocabularies are read from, where a tokenizer as a whole does not show it."""

import pytest

from triforce.errors import UserError
from triforce.hf.vocabulary import read_sentencepiece


@pytest.mark.parametrize("kind, fits", [(1, False), (2, True), (3, False)])
def test_only_bpe_is_read_from_a_sentencepiece_model(tmp_path, kind, fits):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\x0a\x03\x0a\x01a" + b"\x12\x02\x18" + bytes([kind]))  # a piece "a"; the trainer's kind
    if fits:
        assert read_sentencepiece(path) == [("a", 1)]
    else:
        with pytest.raises(UserError, match=f"kind {kind}.*supported is kind 2"):
            read_sentencepiece(path)
