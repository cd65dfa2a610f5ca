"""Converts conversations to tokens and back with the model's own chat template and tokenizer.

    prompt         <s> user: 6*7? assistant:                    what the model is asked to continue
    the model                                 42 <end>          its tokens, which never change again
    continuation                                      \\n user: and 6*8? assistant:

The text to append is found by comparing two texts that the template renders, and only the new text is tokenised. The
template sees the parts of what the model wrote: reasoning, content, calls. A template that renders an earlier turn
without one of them rewrites history: `continuation` raises, and a new sequence begins with a new prompt.
"""

import copy
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from tokenizers import Encoding

from whet.data.messages import Conversation, Message, Tools
from whet.data.records import IntArray
from whet.errors import DataError, RewrittenHistory
from whet.interfaces.chat import Trainable, TrainOn
from whet.moved import leading_on
from whet_chat.pieces import bytes_of, text_of
from whet_chat.response import ResponseFormat, response_format
from whet_chat.templates import ChatTemplate, read_template, read_text
from whet_chat.tokenizer_files import read_json, read_tokenizer, special_tokens

MOST_STOPS = 8
"""Most end-of-turn tokens that are tried as the end of a turn."""


class ChatTokenizer:
    """The tokenizer and chat template of a model folder. Safe to use from several threads."""

    def __init__(
        self, folder: str | Path, chat_template: str | None = None, now: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Read a model folder with `tokenizer.json`. Also read `tokenizer_config.json`, `special_tokens_map.json`,
        `chat_template.jinja` and `generation_config.json` if they exist.

        `chat_template` is a file, or a template itself, to use instead of the folder's. `now` is the time that
        templates see; by default the time of construction. `arguments` are passed to the template. Raises
        `DataError` that names what is missing.
        """
        self.folder = Path(folder)
        self._now, self._arguments = now or datetime.now(), dict(arguments or {})
        self._config = read_json(self.folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in self._config:
            self._config = {**self._config, **read_json(self.folder / "special_tokens_map.json")}
        self._special = special_tokens(self._config)
        self._tokenizer = read_tokenizer(self.folder, self._config, self._special)
        generation = read_json(self.folder / "generation_config.json") or read_json(self.folder / "config.json")
        self._eos, self._eos_text = generation.get("eos_token_id"), self._special.get("eos_token", "")
        given = None if chat_template is None else given_template(chat_template)
        self._tools: Tools = ()
        self._original = self  # copies use its response format
        self._source, self._own = given or read_template(self.folder, self._config), given is None

    @cached_property
    def template(self) -> ChatTemplate:
        """Return the chat template. Raises `DataError` if the folder has none."""
        if self._source is None:
            raise DataError(
                f"{self.folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "give one with model.chat_template, or use a model that was tuned for chat"
            )
        try:
            return ChatTemplate(self._source, self._special, self._now, self._arguments)
        except DataError as error:
            raise DataError(f"{self.folder if self._own else 'model.chat_template'}: {error}") from error

    def with_tools(self, tools: Tools) -> "ChatTokenizer":
        """Return a copy whose conversations have these tools. A chat template that knows no tools leaves them out.

        The copy shares the compiled template and what was learned from it: data may have other tools in each record.
        """
        if tools == self._tools:
            return self
        with suppress(DataError):  # rendering a conversation raises the error
            _ = self.template, self._stop_texts, self._anchor, self._begin
        other = copy.copy(self)
        other._tools = tools
        return other

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation, by default without the header of a next turn."""
        shown = tuple(self._shown(message) for message in conversation)
        try:
            return self.template.render(shown, tools=self._tools, generation_prompt=generation_prompt)
        except DataError:
            if not any(message.written for message in conversation):
                raise
            # A template that refuses calls may accept the same message as text.
            plain = [evolve(message, calls=()) if message.written else message for message in conversation]
            return self.template.render(tuple(plain), tools=self._tools, generation_prompt=generation_prompt)

    def message(self, tokens: IntArray, prefill: str = "") -> Message:
        """Return a completion [completion] as the assistant's message: its text, which begins with the prefill."""
        ended = len(tokens) > 0 and int(tokens[-1]) in self.stop_tokens
        written = self.decode(tokens[:-1] if ended else tokens, skip_special=False)
        return Message("assistant", prefill + self.decode(tokens), written=prefill + written)

    def parts(self, message: Message) -> Message:
        """Return a message with its reasoning, content and tool calls apart, if the model wrote it."""
        return self._format.read(message.written, self._tools) if message.written else message

    def _shown(self, message: Message) -> Message:
        """Return a message as the template takes it. Calls have the ids with which they were recorded."""
        if not message.written:
            return message
        shown = self._format.shown(message.written, self._tools)
        kept = [evolve(call, id=own.id) for call, own in zip(shown.calls, message.calls, strict=False)]
        return evolve(shown, calls=tuple(kept)) if kept else shown

    @property
    def _format(self) -> ResponseFormat:
        return response_format(self._original)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a turn: the end tokens of tokenizer, generation config and chat template."""
        ids = [self._tokenizer.token_to_id(self._eos_text), self._end_of_turn]
        ids += self._eos if isinstance(self._eos, list) else [self._eos]
        return tuple(dict.fromkeys(int(i) for i in ids if i is not None))

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens in the vocabulary, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def plain_tokens(self) -> IntArray:
        """Return the ids of all tokens that are plain text, not special or added: [tokens], ascending."""
        known = np.fromiter(self._tokenizer.get_vocab(with_added_tokens=False).values(), np.int64)
        return np.setdiff1d(known, np.fromiter(self._tokenizer.get_added_tokens_decoder(), np.int64))

    @property
    def opening(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer puts before a text: usually its begin token, or nothing."""
        return tuple(self._begin)

    def encode(self, text: str) -> IntArray:
        """Return the tokens of a text with nothing added. Special tokens written in the text count as special
        tokens. Raises `DataError` for half of a character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = text[max(error.start - 40, 0) : error.end + 40]
            raise DataError(f"a text has half of a character (a lone surrogate), in {near!r}") from None
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Sequence[int] | IntArray, skip_special: bool = True) -> str:
        """Return the text of tokens."""
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    def pieces(self, tokens: IntArray) -> list[str]:
        """Return the text of each token [L] by itself, special tokens included; see `whet_chat.pieces`."""
        found = {token: text_of(self._tokenizer, token) for token in set(tokens.tolist())}
        return [found[token] for token in tokens.tolist()]

    def token_bytes(self, tokens: IntArray) -> list[bytes | None]:
        """Return the bytes of each token [L], of which several may make a character. None: the token is unknown."""
        found = {token: bytes_of(self._tokenizer, token) for token in set(tokens.tolist())}
        return [found[token] for token in tokens.tolist()]

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return the tokens [L] that the model is to continue. They end with the header of its turn."""
        return self.encode(self.render(conversation, generation_prompt=True))

    def continuation(self, history: Conversation, stopped: bool, messages: Conversation) -> IntArray:
        """Return the tokens to append after the model's last completion, so that it can respond to `messages`.

        `history` ends with the model's message. `stopped` is whether its last token is one of `stop_tokens`; if not,
        the tokens that close its turn come first. Raises `RewrittenHistory` if the template rewrites history.
        """
        if not history or history[-1].role != "assistant":
            raise ValueError("a history to continue ends in a message of the assistant")
        asked = self.render(history[:-1], generation_prompt=True)
        whole = self.render((*history, *messages), generation_prompt=True)
        end = self._where_ends(history[-1], whole, len(asked)) if whole.startswith(asked) else None
        if end is None:
            raise _rewritten(asked + (history[-1].written or history[-1].text), whole)
        rest = whole[end:]
        return self._encode_after(*self._without_stop(rest)) if stopped else self._encode_after(rest)

    def _where_ends(self, message: Message, whole: str, begin: int) -> int | None:
        """Return where the turn of `message`, which begins at `begin`, ends in a text. None: another turn is there.

        A template may render a call differently from the model's text, e.g. with other spaces, if its parts are equal.
        """
        end = _end_of(message.written or message.text, whole, begin)
        if end is not None or not message.written:
            return end
        said, at = self._format.shown(message.written, self._tools), begin
        for _ in range(MOST_STOPS):
            stops = [at for stop in self._stop_texts if (at := whole.find(stop, at)) >= 0]
            if not stops:
                return None
            at = min(stops)
            shown = self._format.shown(whole[begin:at], self._tools)
            if _meaning(shown) == _meaning(said):
                return at
            at += 1
        return None

    def training(self, conversation: Conversation, train_on: TrainOn = "all", first: int = 0) -> Trainable:
        """Tokenise a conversation for training on the assistant's turns: content and end-of-turn token, no header.

        `train_on` chooses the turns; `first` is the first message that may be trained on. The first trained turn comes
        after exactly the tokens that `prompt` returns for it, and each further one after the same text. Messages after
        the last turn are left out. Where the template writes no end-of-turn token, the token that opens the next
        message counts, if it is one of `stop_tokens`; the last turn ends in the same one, or in the tokenizer's end
        token. Raises `DataError` if there is no turn to train on, or the template begins it otherwise than it asks for
        it, and `RewrittenHistory` if the template renders a turn otherwise than it does when the turn is last.
        """
        turns = [i for i, message in enumerate(conversation) if message.role == "assistant" and i >= first]
        if not turns:
            raise DataError(f"there is no message of the assistant to train on among {len(conversation)} messages")
        conversation = conversation[: turns[-1] + 1]  # a template may render a turn otherwise before a later message
        whole = self.render(conversation)
        chosen = turns[-1:] if train_on == "last" else turns
        spans: list[tuple[int, int]] = []
        stop = ""
        for i in chosen:
            spans.append(self._turn(conversation, i, whole, stop))
            stop = stop or self._stop_at_end(whole[slice(*spans[-1])], conversation[i])
        begin, end = spans[-1]
        if not whole[begin:end].endswith(self._stop_texts):
            stop = self._next_opening(conversation[-1]) or self._eos_text
            whole, spans[-1] = whole[:end] + stop + whole[end:], (begin, end + len(stop))
        return self._masked(whole, spans)

    def training_text(self, text: str) -> Trainable:
        """Tokenise plain text for training on all of it, between the tokenizer's own begin and end tokens.

        A text that a template rendered has its begin token already. Raises `DataError` if the text would have no end.
        """
        tokens, begin = self._tokenizer.encode(text).ids, self._begin
        if begin and tokens[: 2 * len(begin)] == begin * 2:
            tokens = tokens[len(begin) :]
        tokens = [*tokens, *self._end_after(text, tokens)]
        # No token comes before the first one, so nothing predicts it.
        return Trainable(np.array(tokens, np.int64), np.arange(len(tokens)) > 0, min(1, len(tokens)))

    def training_completion(self, prompt: str, completion: str) -> Trainable:
        """Tokenise a prompt and its completion without a template. The loss is on the completion.

        The tokenizer's own begin and end tokens are put around both, where they are not there. The prompt has the same
        tokens as without the completion. Raises `DataError` if the completion would have no end.
        """
        text = prompt + completion
        found = self._masked(text, [(len(prompt), len(text))])
        prompted = found.tokens[: found.prompt_length].tolist()
        begin = [] if prompted[: len(self._begin)] == self._begin else self._begin
        end = self._end_after(completion, found.tokens.tolist())
        tokens = np.concatenate([np.array(begin, np.int64), found.tokens, np.array(end, np.int64)])
        mask = np.concatenate([np.zeros(len(begin), np.bool_), found.loss_mask, np.ones(len(end), np.bool_)])
        return Trainable(tokens, mask, len(begin) + found.prompt_length)

    def _end_after(self, text: str, tokens: list[int]) -> list[int]:
        """Return the end token to put after plain text, or nothing if it is there. Raises `DataError` if there is none:
        a model that is trained on text without an end never stops.
        """
        eos = self._tokenizer.token_to_id(self._eos_text)
        if eos is not None:
            return [] if tokens[-1:] == [eos] else [eos]
        if not text.rstrip().endswith(self._stop_texts):
            raise DataError(
                f"the tokenizer of {self.folder} has no end token, so a model that is trained on plain text would "
                "never learn to stop; wanted `eos_token` in tokenizer_config.json. Set it to one of its tokens, "
                "or train on messages with a chat template that ends turns (model.chat_template)"
            )
        return []

    def _turn(self, conversation: Conversation, index: int, whole: str, stop: str = "") -> tuple[int, int]:
        """Return where an assistant turn begins and ends in the text of its conversation, in characters.

        `stop`: what an earlier turn of plain text ended with. A turn that has its text and this is not rendered alone.
        """
        asked = self.render(conversation[:index], generation_prompt=True)
        if not whole.startswith(asked):
            before, last = (self.render(conversation[:end]) for end in (index, index + 1))
            is_kept = last.startswith(before) and not last.startswith(asked)
            raise _begun_otherwise(asked, last) if is_kept else _rewritten(asked, whole)
        if stop and index + 1 < len(conversation) and self._is_plain(conversation[index]):
            closed = len(asked) + len(conversation[index].text) + len(stop)
            if whole[len(asked) : closed] == conversation[index].text + stop:
                return len(asked), closed
        is_last = index + 1 == len(conversation)
        answered = whole if is_last else self.render(conversation[: index + 1])
        if answered.startswith(asked) and whole.startswith(answered):
            begin, turn = len(asked), answered[len(asked) :]
            stops = [turn.rfind(text) + len(text) for text in self._stop_texts if text in turn]
            closed = begin + max(stops, default=len(turn.rstrip()))
            # Without an end-of-turn token, white space at the end belongs to the response as far as the message has it.
            closed = max(closed, _end_of(conversation[index].text, answered, begin) or 0)
            is_closed = whole[begin:closed].endswith(self._stop_texts)
            return begin, closed if is_closed else closed + len(self._stop_at(whole, closed))
        # A later message changed how the template closes this turn. Then the turn begins with its words both here and
        # where it is last: a template may write an empty block of reasoning before them only there. How the template
        # writes calls and reasoning is not known here.
        message = conversation[index]
        alone, end = (_end_of(message.text, text, len(asked)) for text in (answered, whole))
        is_text = message.text.strip() and not message.calls and not message.reasoning
        if not is_text or not answered.startswith(asked) or alone is None or end is None:
            raise _rewritten(answered, whole)
        return len(asked), end + len(self._stop_at(whole, end))

    def _next_opening(self, message: Message) -> str:
        """Return the end-of-turn token that opens the message after one of the assistant. Empty: there is none."""
        said = (Message("user", "steel"), Message("assistant", "whetstone", message.calls))
        answer = Message("tool" if message.calls else "user", "iron")
        try:
            turn, longer = self.render(said).rstrip(), self.render((*said, answer))
        except DataError:
            return ""
        return self._stop_at(longer, len(turn)) if longer.startswith(turn) else ""

    def _stop_at_end(self, turn: str, message: Message) -> str:
        """Return the end-of-turn token of a turn that is a message's plain text and this token. Empty: it is not."""
        stop = turn[len(message.text) :]
        return stop if stop in self._stop_texts and turn == message.text + stop and self._is_plain(message) else ""

    def _is_plain(self, message: Message) -> bool:
        """Return whether a message is text alone, without an end-of-turn token in it."""
        others = message.calls or message.reasoning or message.written
        return not others and not any(stop in message.text for stop in self._stop_texts)

    def _masked(self, text: str, spans: list[tuple[int, int]]) -> Trainable:
        """Tokenise text with the loss on spans of characters. The text before the first span has the same tokens as it
        has alone.
        """
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        prompt = self._tokenizer.encode(text[: spans[0][0]], add_special_tokens=False).ids
        tokens, offsets = whole.ids, _offsets(whole)
        mask = np.zeros(len(tokens), np.bool_)
        aligned = tokens[: len(prompt)] == prompt
        for begin, end in spans:
            a = int(np.searchsorted(offsets[:, 1], begin, "right"))
            b = int(np.searchsorted(offsets[:, 0], end, "left"))
            # An end-of-turn token may include the white space after it.
            aligned = aligned and a < b and offsets[a, 0] >= begin
            aligned = aligned and (offsets[b - 1, 1] <= end or tokens[b - 1] in self.stop_tokens)
            mask[a:b] = True
        if not aligned or int(mask.argmax()) != len(prompt):
            return self._pieces(text, spans)
        return Trainable(np.array(tokens, np.int64), mask, len(prompt))

    def _pieces(self, text: str, spans: list[tuple[int, int]]) -> Trainable:
        """Tokenise piece by piece, as in a rollout. Used where a token of the whole text would cross the edge of a
        span.
        """
        prompt = self.encode(text[: spans[0][0]])
        pieces, masks, at, before = [prompt], [np.zeros(len(prompt), np.bool_)], spans[0][0], ""
        for begin, end in [*spans, (len(text), len(text))]:
            for piece, trained in ((text[at:begin], False), (text[begin:end], True)):
                pieces.append(self._encode_after(piece, before))
                masks.append(np.full(len(pieces[-1]), trained))
                before = next((stop for stop in self._stop_texts if piece.endswith(stop)), "")
            at = end
        return Trainable(np.concatenate(pieces), np.concatenate(masks), len(prompt))

    def _encode_after(self, text: str, before: str = "") -> IntArray:
        """Return the tokens of text that follows other text, so that the tokenizer puts nothing before it.

        `before` is the special token in front of the text, if there is one. Some special tokens absorb white space.
        """
        before = before or self._anchor
        if not text or not before:
            return self.encode(text)
        tokens = self.encode(before + text)
        return tokens[1:] if tokens[0] == self._tokenizer.token_to_id(before) else self.encode(text)

    def _without_stop(self, rest: str) -> tuple[str, str]:
        """Return `rest` without its leading end-of-turn token, which the model wrote itself, and that token."""
        bare = rest.lstrip()
        stop = self._stop_at(bare, 0)
        return (bare[len(stop) :], stop) if stop else (rest, "")

    def _stop_at(self, text: str, begin: int) -> str:
        """Return the end-of-turn token at a position in a text. Empty: there is none."""
        return next((stop for stop in self._stop_texts if text.startswith(stop, begin)), "")

    @cached_property
    def _stop_texts(self) -> tuple[str, ...]:
        texts = [self._tokenizer.id_to_token(i) for i in self.stop_tokens]
        return tuple(sorted((text for text in texts if text), key=len, reverse=True))

    @cached_property
    def _begin(self) -> list[int]:
        """Return the tokens that the tokenizer puts before a text."""
        whole, bare = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
        return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), [])

    @cached_property
    def _anchor(self) -> str:
        """Return a special token that absorbs no white space from its neighbours. Empty: there is none."""
        for token in self._tokenizer.get_added_tokens_decoder().values():
            if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized):
                return str(token.content)
        return ""

    @cached_property
    def _end_of_turn(self) -> int | None:
        """Return the special token with which the template closes an assistant turn. None: it uses none."""
        answer = "whetstone"
        try:
            text = self.template.render((Message("user", "steel"), Message("assistant", answer)))
        except DataError:
            return None
        closing = text.rpartition(answer)[2].lstrip()
        tokens = self._tokenizer.encode(closing, add_special_tokens=False).ids
        added = self._tokenizer.get_added_tokens_decoder().get(tokens[0]) if tokens else None
        return tokens[0] if added is not None and added.special else None


def given_template(chat_template: str) -> str:
    """Return the template that `model.chat_template` names: a file, or a template itself. Raises `DataError`."""
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    try:
        return read_text(Path(chat_template))
    except DataError as error:
        raise DataError(f"model.chat_template: {error}") from error


def _meaning(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that are equal for two messages of the same meaning."""
    calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
    return message.reasoning.split(), message.text.split(), calls


def _offsets(encoding: Encoding) -> IntArray:
    return np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _end_of(text: str, rendered: str, begin: int) -> int | None:
    """Return where `text` ends in `rendered`, searched from `begin` on. None: `rendered` does not continue with it.

    White space may differ, since many templates trim it: the model's words count, not how they are rendered later.
    """
    if rendered.startswith(text, begin):
        return begin + len(text)
    at = begin
    for word in text.split():
        while at < len(rendered) and rendered[at].isspace():
            at += 1
        if not rendered.startswith(word, at):
            return None
        at += len(word)
    trailing = text[len(text.rstrip()) :]
    return at + len(trailing) if rendered.startswith(trailing, at) else at


def _begun_otherwise(asked: str, rendered: str) -> DataError:
    begin = max(0, (at := _where_they_part(asked, rendered)) - 40)
    return DataError(
        "the chat template begins a response otherwise than it asks the model for it, so no turn has what the model "
        f"will write. The prompt ends in {asked[begin:]!r:.120} where the turn has {rendered[begin : at + 40]!r}. "
        "Use a template that begins both alike (model.chat_template), e.g. without a tag that opens reasoning"
    )


def _where_they_part(one: str, other: str) -> int:
    return bisect_left(range(min(len(one), len(other))), True, key=lambda i: one[: i + 1] != other[: i + 1])


def _rewritten(history: str, rendered: str) -> RewrittenHistory:
    at = _where_they_part(history, rendered)
    begin = max(0, at - 40)
    return RewrittenHistory(
        "the chat template rewrites history, so tokens that the model has seen would change under it. "
        f"History has {history[begin : at + 40]!r} where the longer conversation has "
        f"{rendered[begin : at + 40]!r}; they part at character {at}. Use a template that only appends "
        "(model.chat_template), or train on the last turn only: in SFT with `train_on: last`, in pairs with a prompt "
        "that holds all turns but the last"
    )


__getattr__ = leading_on(__name__, {"with_ids": "whet.data.records"})
