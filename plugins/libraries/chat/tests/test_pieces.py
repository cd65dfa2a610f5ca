"""Every token has a text by itself, and texts of tokens put together are the text."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from whet_chat.pieces import bytes_of, text_of
from whet_chat.tokenizer import ChatTokenizer


def sentencepiece() -> Tokenizer:
    """A tokenizer that marks words by their space, and falls back to bytes, as Llama 2 and Gemma do."""
    words = ["<unk>", "▁", "a", "▁hand", "ful", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = [(word, -float(i)) for i, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def test_pieces_of_plain_text_add_up_to_it(tiny_model_folder):
    chat = ChatTokenizer(tiny_model_folder)
    text = "<|im_start|>user\nSo 7+8=15,  then\t\\boxed{15}.<|im_end|>"
    pieces = chat.pieces(chat.encode(text))
    assert "".join(pieces) == text
    assert "<|im_end|>" in pieces


def test_parts_of_a_character_are_shown_as_bytes(tiny_model_folder):
    chat = ChatTokenizer(tiny_model_folder)
    assert "".join(chat.pieces(chat.encode("東"))) == "\\xe6\\x9d\\xb1"
    assert "東".encode() == b"\xe6\x9d\xb1"


def test_bytes_of_tokens_add_up_to_the_text_also_within_a_character(tiny_model_folder):
    chat, text = ChatTokenizer(tiny_model_folder), "é🎉 \\xe6 as text, 東<|im_end|>"
    assert b"".join(chat.token_bytes(chat.encode(text))) == text.encode()


def test_a_word_keeps_the_space_before_it():
    tokenizer = sentencepiece()
    assert text_of(tokenizer, tokenizer.token_to_id("▁hand")) == " hand"
    assert text_of(tokenizer, tokenizer.token_to_id("ful")) == "ful"
    assert text_of(tokenizer, tokenizer.token_to_id("<0xE6>")) == "\\xe6"
    assert text_of(tokenizer, tokenizer.token_to_id("<0x0A>")) == "\n"
    assert [bytes_of(tokenizer, tokenizer.token_to_id(name)) for name in ("▁hand", "<0xE6>")] == [b" hand", b"\xe6"]


def test_a_token_beyond_the_vocabulary_is_named(tiny_model_folder):
    chat = ChatTokenizer(tiny_model_folder)
    assert chat.pieces(chat.encode("a") * 0 + 100_000) == ["<unknown 100000>"]
    assert chat.token_bytes(chat.encode("a") * 0 + 100_000) == [None]
