"""Converts text to token ids and back, and chat messages to a prompt.

Conversations may come from anyone on the network, so messages are rebuilt from plain JSON values before the
chat template (text/template.py) sees them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence

import jinja2
from tokenizers import decoders

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.errors import ModelError, RequestError
from blockdraft.text.content import content_text, json_kind
from blockdraft.text.message_text import MessageText, TextEncoder, decode_beside
from blockdraft.text.template import compile_template, run_template

REPLACEMENT = "\ufffd"  # replaces bytes that are not UTF-8

# Byte-level tokenizers write a byte as a character: printable ones as they are, the others from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_VALUES = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_VALUES |= {chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))}

ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")
_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})
_CONTINUE_TAG = "\ue000continue here\ue000"
_SYSTEM, _USER = "\ue000system\ue000", "\ue000user\ue000"  # private-use characters: in no template


class Tokenizer:
    """One checkpoint's tokenizer and chat template. Safe to share between threads.

    It owns `parts.tokenizer` and switches off the truncation and padding stored there.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._tokenizer = parts.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._encoder = TextEncoder(self._tokenizer)
        self.chat_template = parts.chat_template
        names = {"bos_token": parts.bos_token, "eos_token": parts.eos_token}
        self._token_names = {name: token for name, token in names.items() if token is not None}
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)  # special tokens and other markup outside the text
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        eos_id = None if parts.eos_token is None else self.token_id(parts.eos_token)
        self.eos_ids = parts.eos_ids or (() if eos_id is None else (eos_id,))
        # The number of tokens, added ones included; a model's embedding is often larger.
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._byte_ids = self._find_byte_ids()
        self._decodes_apart = _decodes_apart(self._tokenizer.decoder)
        self.plain_text = functools.cache(self._plain_text)  # computed on demand, to start quickly
        self.plain_texts: list[str | None] = [None] * self.vocab_size  # those computed so far, by token

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[TokenizerParts]]:
        """Pickle only the parts, for another process."""
        return Tokenizer, (self._parts,)

    def as_json(self) -> str:
        """Return the tokenizer without the chat template, in the format of tokenizer.json."""
        return str(self._tokenizer.to_str())

    @functools.cached_property
    def added_names(self) -> dict[str, int]:
        """The ids of added tokens, by their text."""
        return {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if no token has it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of special tokens."""
        return frozenset(filter(None, map(self._tokenizer.id_to_token, self.special_ids)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens in it become their ids. RequestError if not Unicode."""
        _check_unicode(text)
        return self._encoder.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; unknown ids add none. RequestError if one is negative or above 32 bits.

        The text differs from that of `tokenizers` in one case: in a run of byte tokens (`<0xE2>`) that is not
        valid UTF-8, only the wrong bytes become U+FFFD, as in SentencePiece, not the whole run. So a later
        byte cannot change a character that was already streamed.
        """
        try:
            if self._byte_ids.keys().isdisjoint(ids):
                return decode_beside(self._tokenizer, ids, skip_special_tokens)
            return self._decode_with_bytes(ids, skip_special_tokens)
        except OverflowError:
            raise RequestError(
                f"a token id is outside the vocabulary (0 to {self.vocab_size - 1}): "
                "send ids of this model's tokenizer."
            ) from None

    def shows(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return True if this id adds text in `decode`."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return bool(self._tokenizer.id_to_token(token_id))

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, which may be part of a character; None if they are unknown."""
        if token_id in self._byte_ids:
            return bytes([self._byte_ids[token_id]])
        decoder, token = self._tokenizer.decoder, self._tokenizer.id_to_token(token_id)
        if decoder is None or token is None or b'"ByteLevel"' not in decoder.__getstate__():
            return None
        values = [_BYTE_VALUES.get(character) for character in token]
        return None if None in values else bytes(value for value in values if value is not None)

    def _plain_text(self, token_id: int) -> str | None:
        """Return the text that a token adds after a whole character; None if it depends on other tokens."""
        is_plain = self._decodes_apart and token_id not in self._byte_ids and self.shows(token_id, True)
        if not is_plain:
            return None
        # Decode the token twice and use the second text, as the first may lose its space.
        first, both = (self.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        if REPLACEMENT in both:
            return None
        text = both[len(first) :]
        if token_id < len(self.plain_texts):
            self.plain_texts[token_id] = text
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: object,
    ) -> str:
        """Return the prompt that the chat template builds from `messages`.

        With `continue_final_message`, there is no generation prompt, and the prompt ends inside the last
        message, which the model continues. Raise RequestError for wrong messages, or if the template fails on
        them, and ModelError for a wrong template.
        """
        chat = [_check_message(message, self.chat_template or "") for message in messages]
        if not chat:
            raise RequestError("the conversation is empty: send at least one message.")
        if wrong := _RESERVED & template_kwargs.keys():
            raise RequestError(f"the chat template sets {sorted(wrong)} itself: leave it out.")
        if continue_final_message:
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}{_CONTINUE_TAG} "}
        variables = {
            "tools": None,
            "documents": None,
            **{name: _plain(value) for name, value in template_kwargs.items()},
            **self._token_names,
            "messages": chat,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = run_template(self._template, variables)
        if continue_final_message:
            text = _cut_at_tag(text)
        _check_unicode(text)
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_special_tokens: bool = False,
        split_special_tokens: bool = True,
        **options: object,
    ) -> list[int]:
        """Return the ids of `render`; by default no special tokens are added, as the template writes them.

        Special tokens in a message, a tool or a document are plain text (text/message_text.py), unless
        `split_special_tokens` is False.
        """
        if not split_special_tokens:
            return self.encode(self.render(messages, **options), add_special_tokens)  # type: ignore[arg-type]
        marked = self._message_text.mark(messages, options)
        text = self.render(marked.messages, **marked.options)  # type: ignore[arg-type]
        return self._message_text.encode(text, marked.mark, add_special_tokens)

    def inserted_system_prompt(self) -> str:
        """Return the system prompt that the template inserts by itself; "" if none is found."""
        question = {"role": "user", "content": _USER}
        try:
            plain = self.render([question])
            ordered = self.render([{"role": "system", "content": _SYSTEM}, question])
        except (RequestError, ModelError):  # no template, or a template without system prompts
            return ""
        before, found, after = ordered.partition(_SYSTEM)
        if not found or len(plain) < len(before) + len(after):
            return ""
        is_framed_alike = plain.startswith(before) and plain.endswith(after)
        return plain[len(before) : len(plain) - len(after)].strip() if is_framed_alike else ""

    @functools.cached_property
    def _message_text(self) -> MessageText:
        return MessageText(self._tokenizer, self._encoder)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template: use generate or /v1/completions with a plain "
                "prompt, or serve a model that has one (its name often ends in -Instruct or -it)."
            )
        return compile_template(self.chat_template)

    def _find_byte_ids(self) -> dict[int, int]:
        """Return the byte of each <0xNN> token by id; {} for tokenizers without such tokens."""
        decoder = self._tokenizer.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return {}
        ids = {self._tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token_id: byte for token_id, byte in ids.items() if token_id is not None}

    def _decode_with_bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        shown = [i for i in ids if self.shows(i, skip_special_tokens)]
        tokens = [self._tokenizer.id_to_token(i) or "" for i in shown]
        for at in _broken_bytes([self._byte_ids.get(i) for i in shown]):
            tokens[at] = REPLACEMENT
        return str(self._tokenizer.decoder.decode(tokens))


def _decodes_apart(decoder: decoders.Decoder | None) -> bool:
    """Return True if a token of whole characters adds the same text everywhere, except as the first token.

    That is the case if the decoder maps token by token, except to join bytes to characters and to drop one
    space at the very beginning. Return False for unknown decoders.
    """
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    num_stripped = sum(part["start"] for part in parts if part["type"] == "Strip")
    return num_stripped <= 1 and all(map(_is_apart, parts))


def _is_apart(part: dict[str, object]) -> bool:
    if part["type"] == "Replace":
        # A longer pattern may match across two tokens; with an empty text the next token would be the first.
        pattern = part["pattern"]
        return isinstance(pattern, dict) and len(pattern.get("String", "")) == 1 and bool(part["content"])
    if part["type"] == "Strip":
        return part["stop"] == 0
    return part["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")


def _broken_bytes(values: Sequence[int | None]) -> Iterator[int]:
    """Yield the indices of bytes outside whole UTF-8 characters; None stands for other tokens."""
    at = 0
    while at < len(values):
        lead = values[at]
        size = 1 if lead is None or lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        is_whole = lead is None or _is_utf8(values[at : at + size])
        if not is_whole:
            yield at
        at += size if is_whole else 1


def _is_utf8(values: Sequence[int | None]) -> bool:
    try:  # without None: a character with a missing byte is not UTF-8 either
        bytes(byte for byte in values if byte is not None).decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"the text is not valid Unicode (unpaired surrogate U+{ord(text[e.start]):04X} at "
            f"character {e.start}): send whole characters; in JSON an emoji is two \\u escapes."
        ) from None


def _check_message(message: object, template: str) -> dict[str, object]:
    """Return a copy of one message with its content as one string; keep keys such as tool_calls."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f'a message is {json_kind(message)}, not an object: send {{"role": "user", "content": "..."}}.'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        found = "a message's role is " + json_kind(role) if role else "a message has no role"
        raise RequestError(f"{found}: use 'system', 'user' or 'assistant'.")
    # Most templates accept any role, so refuse misspelt ones here.
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise RequestError(
            f"a message has the role '{role[:40]}', which the model's template does not know: use one of "
            f"{', '.join(ROLES)}.",
            field="messages",
        )
    plain = {str(key): _plain(value) for key, value in message.items()}
    return {**plain, "content": content_text(plain)}


def _plain(value: object) -> object:
    """Return a copy made of JSON types only: the sandbox does not guard other objects' methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise RequestError("a value that is not JSON was sent to the chat template: send JSON values only.")


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG)
    if at < 0:
        raise RequestError(
            "the chat template leaves out the end of the final message, so it cannot be continued: "
            "set continue_final_message to false."
        )
    # A template that strips its messages has removed the space after the tag.
    end = at + len(_CONTINUE_TAG)
    return text[:at] if text[end : end + 1] == " " else text[:at].rstrip()
