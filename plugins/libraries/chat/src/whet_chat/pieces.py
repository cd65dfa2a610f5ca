"""The text of single tokens as it can be shown, and their bytes, including tokens that hold a part of a character."""

import re
from functools import cache

from tokenizers import Tokenizer


def text_of(tokenizer: Tokenizer, token: int) -> str:
    r"""Return the text that a token adds to the text before it. Bytes that are no whole character are shown as `\xe6`.

    A token id that the tokenizer does not know (models often have more rows than tokens) gives `<unknown 151999>`.
    """
    found = bytes_of(tokenizer, token)
    return f"<unknown {token}>" if found is None else found.decode(errors="backslashreplace")


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Return the bytes that a token adds to the text before it. None: the tokenizer does not know the token."""
    name = tokenizer.id_to_token(token)
    if name is None:
        return None
    # Some decoders remove a space at the front of a text, so the token is decoded in second position.
    first = tokenizer.decode([token], skip_special_tokens=False)
    text = str(tokenizer.decode([token, token], skip_special_tokens=False)[len(first) :])
    if "\ufffd" not in text and (text or not name):
        return text.encode()
    return _from_name(name) or (text or str(name)).encode()


def _from_name(name: str) -> bytes:
    """Return the bytes in a token's name, as the two usual kinds of tokenizers write them. Empty: it is neither
    kind.
    """
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
        return bytes([int(byte[1], 16)])
    if any(letter not in _byte_letters() for letter in name):
        return b""
    return bytes(_byte_letters()[letter] for letter in name)


@cache
def _byte_letters() -> dict[str, int]:
    """Return the letter that byte-level BPE writes for each byte (Radford et al. 2019, `bytes_to_unicode` of GPT-2)."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}
