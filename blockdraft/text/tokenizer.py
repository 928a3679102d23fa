"""Text to token ids and back, and chat messages to a prompt.

A conversation comes from anyone on the network: messages are rebuilt from plain JSON values before the
chat template (text/template.py) sees them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import jinja2

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.errors import RequestError
from blockdraft.text.content import content_text, json_kind
from blockdraft.text.message_text import MessageText, decode_beside, encode_beside
from blockdraft.text.plain_texts import PlainTexts, decodes_apart
from blockdraft.text.template import compile_template, run_template

REPLACEMENT = "\ufffd"  # what stands for bytes that are not UTF-8

# Byte-level tokenizers write a byte as a character: printable ones as they are, the others from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_VALUES = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_VALUES |= {chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))}

ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")
_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})
_CONTINUE_TAG = "\ue000continue here\ue000"


class Tokenizer:
    """One checkpoint's tokenizer and chat template. Safe to share between threads.

    Takes over `parts.tokenizer`: truncation and padding stored in it are switched off.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._tokenizer = parts.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._chat_template = parts.chat_template
        names = {"bos_token": parts.bos_token, "eos_token": parts.eos_token}
        self._token_names = {name: token for name, token in names.items() if token is not None}
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)  # they stand outside the text: special tokens, and other markup
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_ids = parts.eos_ids or self._ids_of(parts.eos_token)
        # Entries, added tokens included; a model's embedding is often padded past it.
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._byte_ids = self._find_byte_ids()
        self._decodes_apart = decodes_apart(self._tokenizer.decoder)
        self.plain_texts = PlainTexts(self._plain_text)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[TokenizerParts]]:
        """For another process."""
        return Tokenizer, (self._parts,)

    def as_json(self) -> str:
        """Everything but the template, as `tokenizers` writes it."""
        return str(self._tokenizer.to_str())

    @functools.cached_property
    def added_names(self) -> dict[str, int]:
        """Ids of added tokens, by how they are written."""
        return {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """Its source."""
        return self._chat_template

    def token_id(self, token: str) -> int | None:
        """The id of the token with this text; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """How special tokens are written."""
        return frozenset(filter(None, map(self._tokenizer.id_to_token, self.special_ids)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens spelled out in `text` become their ids. RequestError if not Unicode."""
        _check_unicode(text)
        return encode_beside(self._tokenizer, text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary have none.

        As `tokenizers` does it, but for one case: in a run of byte tokens (`<0xE2>`) that is not
        valid UTF-8, only the bytes at fault become U+FFFD, as in SentencePiece, and not the whole
        run. A later byte can then never take back a character that was already streamed.
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
        """Whether `decode` looks at this id at all."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return bool(self._tokenizer.id_to_token(token_id))

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of one token, which may be a part of a character; None: its tokenizer has none."""
        if token_id in self._byte_ids:
            return bytes([self._byte_ids[token_id]])
        decoder, token = self._tokenizer.decoder, self._tokenizer.id_to_token(token_id)
        if decoder is None or token is None or b'"ByteLevel"' not in decoder.__getstate__():
            return None
        values = [_BYTE_VALUES.get(character) for character in token]
        return None if None in values else bytes(value for value in values if value is not None)

    def _plain_text(self, token_id: int) -> str | None:
        is_plain = self._decodes_apart and token_id not in self._byte_ids and self.shows(token_id, True)
        if not is_plain:
            return None
        # Of two the second shows what the token adds: the first may lose its space.
        first, both = (self.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return None if REPLACEMENT in both else both[len(first) :]

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: object,
    ) -> str:
        """The prompt the chat template makes of `messages`.

        With `continue_final_message` the prompt ends inside the last message, so that the model
        goes on writing it; this takes the place of the generation prompt. RequestError: the
        messages, or the template on these messages, are at fault. ModelError: the template is.
        """
        chat = [_check_message(message, self._chat_template or "") for message in messages]
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
        """`render`, as ids. The template writes its own special tokens, so none are added.

        Special tokens that are spelled out in a message, in a tool or in a document are text
        (text/message_text.py), unless `split_special_tokens` is false.
        """
        if not split_special_tokens:
            return self.encode(self.render(messages, **options), add_special_tokens)  # type: ignore[arg-type]
        marked = self._message_text.mark(messages, options)
        text = self.render(marked.messages, **marked.options)  # type: ignore[arg-type]
        return self._message_text.encode(text, marked.mark, add_special_tokens)

    @functools.cached_property
    def _message_text(self) -> MessageText:
        return MessageText(self._tokenizer)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template: use generate or /v1/completions with a plain "
                "prompt, or serve a model that has one (its name often ends in -Instruct or -it)."
            )
        return compile_template(self._chat_template)

    def _ids_of(self, token: str | None) -> tuple[int, ...]:
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return () if token_id is None else (token_id,)

    def _find_byte_ids(self) -> dict[int, int]:
        """id → byte, for tokenizers that spell unknown characters as <0xNN> tokens."""
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


def _broken_bytes(values: Sequence[int | None]) -> Iterator[int]:
    """Places of bytes that are not part of a whole UTF-8 character; None stands for other tokens."""
    at = 0
    while at < len(values):
        lead = values[at]
        size = 1 if lead is None or lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        is_whole = lead is None or _is_utf8(values[at : at + size])
        if not is_whole:
            yield at
        at += size if is_whole else 1


def _is_utf8(values: Sequence[int | None]) -> bool:
    """A character with a byte missing is not; that is why None can simply be left out."""
    try:
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
    """A copy of one message with its text as one string; keys such as tool_calls are kept.

    Most templates write any role down, so one that is misspelt is refused here.
    """
    if not isinstance(message, Mapping):
        raise RequestError(
            f'a message is {json_kind(message)}, not an object: send {{"role": "user", "content": "..."}}.'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        found = "a message's role is " + json_kind(role) if role else "a message has no role"
        raise RequestError(f"{found}: use 'system', 'user' or 'assistant'.")
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise RequestError(
            f"a message has the role '{role[:40]}', which the model's template does not know: use one of "
            f"{', '.join(ROLES)}.",
            field="messages",
        )
    plain = {str(key): _plain(value) for key, value in message.items()}
    return {**plain, "content": content_text(plain)}


def _plain(value: object) -> object:
    """A copy made of JSON types only: the sandbox does not know other objects' methods."""
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
    # A template that strips its messages has eaten the space behind the tag.
    end = at + len(_CONTINUE_TAG)
    return text[:at] if text[end : end + 1] == " " else text[:at].rstrip()
