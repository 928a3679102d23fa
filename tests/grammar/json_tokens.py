"""A tokenizer of the tiny pair's 64 ids in which JSON can be written: characters, and some longer pieces.

The pair knows nothing of it, and what it would say is noise; a structured output makes answers of it.
"""

import functools

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.grammar.structured_output import StructuredOutputs, Thinking
from blockdraft.text.tokenizer import Tokenizer

EOS = 62
CHARACTERS = '{}[]":,.-0123456789abcdeflnrstuxyĠĊ'
MERGES = [
    *('{ "', '" :', '" ,', '" }', "t r", "u e", "tr ue", "f a", "l s", "fa ls", "fals e"),
    *("n u", "l l", "nu ll", 'Ġ "', '": Ġ', "Ċ Ġ", "Ġ Ġ", "a b", "ab c"),
]
THINK, ENOUGH, ANSWER = "<think>", "</think>", "<answer>"


@functools.cache
def tokenizer():
    pieces = [*CHARACTERS, *("".join(merge.split()) for merge in MERGES)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge.split()) for merge in MERGES]
    fast = Fast(models.BPE(vocabulary, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    unused = [f"<unused{i}>" for i in range(EOS - len(pieces) - 3)]
    fast.add_tokens(
        [AddedToken(text, special=True) for text in (THINK, ENOUGH, ANSWER, *unused, "<eos>", "<mask>")]
    )
    made = Tokenizer(TokenizerParts(fast, None, None, "<eos>", (EOS,)))
    assert made.encode("<eos>") == [EOS]
    return made


def ids(text):
    return tuple(tokenizer().encode(text))


# ---- random structured outputs

_NAMES = st.text(alphabet="abcdxy", min_size=1, max_size=3)
_LEAVES = st.one_of(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "number"}]),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(lambda names: {"enum": names}, st.lists(_NAMES, min_size=1, max_size=3, unique=True)),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        *2 * [st.integers(0, 120)],
    ),
)


def _object(properties, data):
    required = sorted(properties)[: data % (len(properties) + 1)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": data % 2 == 0,
    }


def _nested(inner):
    return st.one_of(
        st.builds(_object, st.dictionaries(_NAMES, inner, max_size=3), st.integers(0, 11)),
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    )


schemas = st.recursive(_LEAVES, _nested, max_leaves=5)
_PIECES = st.sampled_from(["a", "[bc]", "x+", "(ab|y)", r"\d{2,3}", "(true|false)?", '"', " ", "[^a]{0,4}"])
regexes = st.lists(_PIECES, min_size=1, max_size=4).map("".join)
GRAMMAR = 'start: pair ("," pair)*\npair: /[a-c]+/ ":" (NUMBER | "[" pair "]")\nNUMBER: /-?[0-9]+/'
GBNF = 'root ::= ("ab" | "x") [0-9]+ ("," root)?'
outputs = st.one_of(
    schemas.map(lambda schema: StructuredOutputs(json=schema)),
    regexes.map(lambda regex: StructuredOutputs(regex=regex)),
    st.lists(_NAMES, min_size=1, max_size=4).map(lambda names: StructuredOutputs(choice=names)),
    st.sampled_from([StructuredOutputs(grammar=text) for text in (GRAMMAR, GBNF)]),
    st.just(StructuredOutputs(json_object=True)),
)


@st.composite
def thoughts(draw):
    """None, or how an answer may think first: opened by the prompt or itself, closed by one token or more."""
    if draw(st.booleans()):
        return None
    return Thinking(
        open_ids=draw(st.sampled_from([(), ids(THINK), ids(THINK) + ids("ab")])),
        close_ids=draw(st.sampled_from([ids(ENOUGH), ids(ENOUGH) + ids(ANSWER), ids("ab")])),
        max_tokens=draw(st.sampled_from([None, 0, 1, 5])),
    )
