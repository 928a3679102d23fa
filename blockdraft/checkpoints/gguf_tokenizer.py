"""Rebuilds the tokenizer of a GGUF file for the `tokenizers` library.

Two kinds are supported: "gpt2" is byte-level BPE with stored merges, and "llama" is SentencePiece BPE, whose
merges follow from the scores of its pieces. GGUF stores only llama.cpp's name for the pre-tokenizer. An
unknown name raises an error, because a wrong guess would produce subtly wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from blockdraft.checkpoints.gguf_header import GgufHeader
from blockdraft.checkpoints.tokenizer_parts import TokenizerParts, refusing
from blockdraft.errors import ModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_SPACE = "▁"  # a space in SentencePiece
_WORDS = (  # the split of llama3 and qwen2, except the digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = "|".join(  # the split of tiktoken's o200k encodings, which gpt-oss uses
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def tokenizer_parts(file: GgufHeader) -> TokenizerParts:
    """Return the tokenizer of `file`. Raise ModelError if it cannot be rebuilt exactly."""
    tokens = file.texts("tokenizer.ggml.tokens")
    bos_id = _token_id(file, "bos", num_tokens=len(tokens))
    end_ids = [_token_id(file, role, num_tokens=len(tokens)) for role in ("eos", "eot")]
    eos_id = end_ids[0]
    with refusing(f"'{file.name}': its tokenizer cannot be rebuilt", "Convert the model again."):
        tokenizer = _build(file, tokens)
        if bos_id is not None and _adds_bos(file):
            _prepend_bos(tokenizer, tokens[bos_id], bos_id)
    return TokenizerParts(
        tokenizer=tokenizer,
        chat_template=file.keys("tokenizer.").optional("chat_template", str),
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=None if eos_id is None else tokens[eos_id],
        eos_ids=tuple(dict.fromkeys(id_ for id_ in end_ids if id_ is not None)),
    )


def _build(file: GgufHeader, tokens: list[str]) -> Tokenizer:
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for id_, token in enumerate(tokens) if vocabulary[token] != id_)
        raise ModelError(
            f"'{file.name}': the token {twice!r} appears twice in its vocabulary. Convert the model again."
        )
    types = file.numbers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ModelError(
            f"'{file.name}' has {len(tokens)} tokens but {len(types)} token types. Convert the model again."
        )
    model = file.keys("tokenizer.ggml.").get("model", str)
    if model == "gpt2":
        tokenizer = _byte_level(file, vocabulary)
    elif model == "llama":
        tokenizer = _sentencepiece(file, vocabulary, types)
    else:
        raise ModelError(
            f"'{file.name}' has a {model!r} tokenizer; supported are 'gpt2' and 'llama'. See docs/models.md."
        )
    _add_tokens(tokenizer, tokens, types)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[float]) -> None:
    """Add control and user-defined tokens, which are matched before the text is split."""
    marked = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, type_ in marked if type_ == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, type_ in marked if type_ == _USER_DEFINED]
    )


def _byte_level(file: GgufHeader, vocabulary: Mapping[str, int]) -> Tokenizer:
    pre = file.keys("tokenizer.ggml.").get("pre", str)
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(
            f"'{file.name}' has the pre-tokenizer {pre!r}; supported are {known}. See docs/models.md."
        )
    merges = []
    for merge in file.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufHeader, vocabulary: Mapping[str, int], types: list[float]) -> Tokenizer:
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        raise ModelError(
            f"'{file.name}' has {len(vocabulary)} tokens but {len(scores)} scores. Convert the model again."
        )
    unknown_id = _token_id(file, "unknown", num_tokens=len(vocabulary))
    tokenizer = Tokenizer(
        BPE(
            vocab=dict(vocabulary),
            merges=_merges(vocabulary, scores, types),
            unk_token=list(vocabulary)[unknown_id or 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = file.keys("tokenizer.ggml.").get("add_space_prefix", bool, True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float], types: list[float]) -> list[tuple[str, str]]:
    """Return every split of a piece into two pieces in SentencePiece's order: the best score first."""
    pieces = {piece: scores[id_] for piece, id_ in vocabulary.items() if types[id_] == _NORMAL}
    splits = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    splits.sort(key=lambda split: (split[0], -len(split[1]), -len(split[2])))
    return [(left, right) for _, left, right in splits]


def _words_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LLAMA3 = _words_split(_WORDS.format(digits=r"\p{N}{1,3}"))
_PRE_TOKENIZERS: Mapping[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _words_split(_WORDS.format(digits=r"\p{N}")),
    "gpt-4o": _words_split(_O200K),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3")
_WHOLE_WORDS = (*_LLAMA3_NAMES, "gpt-4o")  # as in tiktoken, a word of the vocabulary is never split


def _adds_bos(file: GgufHeader) -> bool:
    # llama.cpp's defaults for files without the key: SentencePiece and llama3 start with bos.
    keys = file.keys("tokenizer.ggml.")
    by_default = keys.get("model", str) == "llama" or keys.get("pre", str, "") in _LLAMA3_NAMES
    return keys.get("add_bos_token", bool, by_default)


def _prepend_bos(tokenizer: Tokenizer, bos_token: str, bos_id: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos_token, "$A"], pair=[bos_token, "$A", "$B"], special_tokens=[(bos_token, bos_id)]
    )


def _token_id(file: GgufHeader, role: str, *, num_tokens: int) -> int | None:
    keys, key = file.keys("tokenizer.ggml."), f"{role}_token_id"
    id_ = keys.optional(key, int)
    if id_ is not None and not 0 <= id_ < num_tokens:
        raise keys.wrong(key, id_, f"but the vocabulary has {num_tokens} tokens")
    return id_
