"""The text of a completion, at once or as its tokens come.

Text that goes on behind a prompt is decoded behind other text, because some decoders remove a space at the front.
"""

import numpy as np

from whet.data.records import IntArray
from whet.interfaces.chat import Chat
from whet_chat.learn import common

UNFINISHED = "\ufffd"
"""What tokenizers write for a part of a character."""
BEFORE = "a"
"""Any text: what comes behind it is not the front of a text."""


def continued(chat: Chat, tokens: IntArray) -> str:
    """Return the text of tokens that go on behind other text, without special tokens."""
    before = chat.encode(BEFORE)
    return chat.decode(np.concatenate([before, tokens])).removeprefix(chat.decode(before))


class Decoding:
    """The text of tokens as they come. A part of a character at its end waits for the rest."""

    def __init__(self, chat: Chat, *, continues: bool, skip_special: bool = True) -> None:
        """`continues`: whether the text goes on behind other text."""
        self._chat, self._skip_special = chat, skip_special
        self._tokens = chat.encode(BEFORE) if continues else np.zeros(0, np.int64)
        self._read, self._done = 0, len(self._tokens)
        """Tokens before `_done` are in the text; those from `_read` on are the context of the next ones."""
        self.text, self._waiting = "", ""

    def add(self, tokens: IntArray) -> bool:
        """Add tokens. Return whether all of them are in the text now."""
        self._tokens = np.concatenate([self._tokens, tokens])
        before = self._chat.decode(self._tokens[self._read : self._done], skip_special=self._skip_special)
        after = self._chat.decode(self._tokens[self._read :], skip_special=self._skip_special)
        self._waiting = after[len(before) :]
        if after.endswith(UNFINISHED) or not after.startswith(before):
            return False
        if self._waiting:  # special tokens alone are no context: what follows would be the front of a text
            self._read = self._done
        self._done = len(self._tokens)
        self.text, self._waiting = self.text + self._waiting, ""
        return True

    def offsets(self, tokens: IntArray) -> list[int]:
        """Add tokens. Return where each of them begins in the text."""
        begun = []
        for token in tokens:
            begun.append((len(self.text), self._waiting))
            self.add(token[None])
        whole = self.text + self._waiting
        return [at + common(waiting, whole[at : at + len(waiting)]) for at, waiting in begun]
