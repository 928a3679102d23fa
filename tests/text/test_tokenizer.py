"""The tokenizer: text, messages and templates, some of them made to do harm."""

from __future__ import annotations

import re
import threading
import time

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from blockdraft.checkpoints.tokenizer_parts import TokenizerParts
from blockdraft.errors import ModelError, RequestError
from blockdraft.text.tokenizer import Tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}"
)
HELLO = [{"role": "user", "content": "Hi <b>"}]


def bare_byte_tokenizer() -> RustTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = RustTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_tokenizer() -> RustTokenizer:
    tokenizer = bare_byte_tokenizer()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def make(template: str | None = CHATML, eos_ids: tuple[int, ...] = (258,)) -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_tokenizer(), template, "<s>", "<|im_end|>", eos_ids))


def render(template: str, **kwargs: object) -> str:
    return make(template).render(HELLO, **kwargs)


def test_special_tokens_are_added_recognised_and_skipped():
    tokenizer = make()
    ids = tokenizer.encode("é<|im_end|>")
    assert ids[0] == 256
    assert ids[-1] == 258
    assert tokenizer.encode("é<|im_end|>", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>é<|im_end|>"
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.vocab_size == 259


@pytest.mark.slow
@pytest.mark.parametrize("what", ["encode", "decode"])
def test_other_threads_go_on_while_a_long_text_is_encoded_or_decoded(what: str):
    tokenizer, text = make(), "ab c" * 50_000
    known_ids = tokenizer.encode(text)
    longest_s, is_over = 0.0, threading.Event()

    def run() -> None:
        nonlocal longest_s
        last = time.monotonic()
        while not is_over.is_set():
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last), now

    thread = threading.Thread(target=run)
    thread.start()
    began = time.monotonic()
    found = tokenizer.encode(text) if what == "encode" else tokenizer.decode(known_ids)
    took_s = time.monotonic() - began
    is_over.set()
    thread.join()
    assert longest_s < took_s / 2
    assert found == (known_ids if what == "encode" else text)


def test_eos_ids_fall_back_to_the_eos_token_only_when_the_checkpoint_lists_none():
    assert make(eos_ids=()).eos_ids == (258,)
    assert make(eos_ids=(7, 8)).eos_ids == (7, 8)


def test_truncation_and_padding_stored_in_the_file_are_ignored():
    parts = TokenizerParts(byte_tokenizer(), None, None, None, ())
    parts.tokenizer.enable_truncation(max_length=4)
    parts.tokenizer.enable_padding(length=50)
    assert len(Tokenizer(parts).encode("twenty characters ok")) == 21


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "\ude00\ud83d"])
def test_unpaired_surrogates_are_the_users_error(text: str):
    with pytest.raises(RequestError, match="unpaired surrogate"):
        make().encode(text)
    with pytest.raises(RequestError, match="unpaired surrogate"):
        make().render([{"role": "user", "content": text}])


@pytest.mark.parametrize("bad", [-1, 2**40])
def test_an_impossible_token_id_is_the_users_error(bad: int):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        make().decode([bad])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        make().decode([bad] * 5000)


def test_chatml_renders_every_turn_and_then_the_generation_prompt():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "<b> é"}]
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<b> é<|im_end|>\n"
    assert make().render(messages, add_generation_prompt=False) == expected
    assert make().render(messages) == expected + "<|im_start|>assistant\n"


def test_encode_chat_adds_no_second_bos():
    ids = make("{{ bos_token }}{{ messages[0].content }}").encode_chat(HELLO)
    assert ids.count(256) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in [1, 2, 3, 4] %}{% if m == 2 %}{% continue %}{% endif %}"
         "{% if m == 4 %}{% break %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{{ {'k': '<é>&'} | tojson }}", '{"k": "<é>&"}'),
        ("{{ {'k': [1]} | tojson(indent=2) }}", '{\n  "k": [\n    1\n  ]\n}'),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ bos_token ~ 1 ~ eos_token }}", "<s>1<|im_end|>"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abHi <b>c"),
        ("    {% if true %}\nx\n    {% endif %}\ny", "x\ny"),
        ("{% set ns = namespace(n=0) %}{% for m in range(5) %}{% set ns.n = ns.n + m %}"
         "{% endfor %}{{ ns.n }}", "10"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{{ loop.length }}"
         "{% endfor %}", "a1True1"),
        ("{% for m in messages | selectattr('role') %}{{ loop.length }}{% endfor %}", "1"),
        ("{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1700000000) }}", "1700000000"),
        ("{{ '%s' % 1700000000 }}{{ '{}'.format(1700000000) }}", "17000000001700000000"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ missing }}{{ 'x' if missing is defined else 'y' }}", "y"),
    ],
)  # fmt: skip
def test_the_dialect_chat_templates_are_written_in(template: str, expected: str):
    assert render(template) == expected


def test_template_arguments_reach_the_template_and_reserved_ones_do_not():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    with pytest.raises(RequestError, match="bos_token"):
        render("{{ bos_token }}", bos_token="x")
    with pytest.raises(RequestError, match="JSON values only"):
        render("", helper=object())


def test_strftime_now_prints_the_date():
    assert re.fullmatch(r"20\d\d-\d\d", render("{{ strftime_now('%Y-%m') }}"))


def test_what_raise_exception_says_reaches_the_user():
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("template", ["{{ messages[5].content.strip() }}", "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}", "{% include 'x' %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ missing | tojson }}"])  # fmt: skip
def test_a_template_that_fails_on_the_messages_is_a_request_error(template: str):
    with pytest.raises(RequestError, match="failed on these messages"):
        render(template)


@pytest.mark.parametrize("template", ["{% for %}", "{{ x | nosuch }}", "{% if true %}", "{{"])
def test_a_template_that_does_not_parse_is_a_model_error_but_only_for_chats(template: str):
    tokenizer = make(template)
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"
    with pytest.raises(ModelError, match="does not parse"):
        tokenizer.render(HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ strftime_now.__globals__['re'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ self._TemplateReference__context.parent }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str):
    with pytest.raises(ModelError, match="something forbidden"):
        render(template)


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ range(10 ** 9) | list }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 1000000000 }}",
    "{{ 'a'.center(10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ {'a': 1} | tojson(indent=10 ** 10) }}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x.replace('a', n.x) %}"
    "{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x|replace('a', n.x) %}"
    "{% endfor %}",
    "{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [[]] recursive %}{{ loop([[], []]) }}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_cannot_run_away(template: str):
    start = time.monotonic()
    with pytest.raises((ModelError, RequestError)):
        render(template)
    assert time.monotonic() - start < 20  # takes about a second; a bomb takes the machine


def test_a_long_conversation_is_within_the_budget():
    messages = [{"role": "user", "content": "word " * 400}] * 2000
    assert len(make().render(messages)) > 4_000_000


def test_no_chat_template_says_what_to_do():
    assert not make(None).has_chat_template
    with pytest.raises(RequestError, match="completions"):
        make(None).render(HELLO)


def test_text_parts_are_joined_and_other_keys_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "tool", "content": parts, "tool_call_id": "x"}
    assert make("{{ messages[0].content }}|{{ messages[0].tool_call_id }}").render([message]) == ("a\nb|x")


def test_the_model_and_its_tools_may_come_without_text_and_nobody_else():
    calls = [{"function": {"name": "f", "arguments": {}}}]
    said = {"role": "assistant"}
    for message in ({**said, "tool_calls": calls}, said, {**said, "content": None}, {**said, "content": []}):
        assert make("[{{ messages[0].content }}]").render([message]) == "[]"
    assert make("[{{ messages[0].content }}]").render([{"role": "tool", "content": None}]) == "[]"
    with pytest.raises(RequestError, match="content is null"):
        make().render([{"role": "user", "content": None}])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hello", "not an object"),
        ({"content": "x"}, "no role"),
        ({"role": 3, "content": "x"}, "role is a number"),
        ({"role": "user", "content": 5}, "content is a number"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "text only"),
        ({"role": "user", "content": ["x"]}, "part of a message is a string"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "must be a string"),
        ({"role": "user", "content": "x", "extra": b"y"}, "JSON values only"),
    ],
)
def test_malformed_messages_are_named(message: dict[str, object], error: str):
    with pytest.raises(RequestError, match=error):
        make().render([message])


def test_an_empty_conversation_is_refused():
    with pytest.raises(RequestError, match="empty"):
        make().render([])


STRIPPING = CHATML.replace("message.content", "message.content | trim")


@pytest.mark.parametrize(
    ("template", "content", "end"),
    [(CHATML, "Sure, ", "Sure, "), (STRIPPING, "Sure, ", "Sure,"), (CHATML, "", "")],
)
def test_the_final_message_can_be_continued(template: str, content: str, end: str):
    messages = [*HELLO, {"role": "assistant", "content": content}]
    text = make(template).render(messages, continue_final_message=True)
    assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{end}")


def test_continuing_takes_the_place_of_the_generation_prompt():
    template = "{{ add_generation_prompt }} {{ messages[0].content }}"
    assert make(template).render(HELLO, continue_final_message=True) == "False Hi <b>"


def test_a_final_message_the_template_drops_cannot_be_continued():
    with pytest.raises(RequestError, match="cannot be continued"):
        make("{{ messages[0].role }}").render(HELLO, continue_final_message=True)


def test_a_template_that_fails_speaks_of_json():
    template = make("{{ messages[0].content.city.name }}")
    with pytest.raises(RequestError, match=r"messages \(a string has no attribute 'city'\): check"):
        template.render([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="messages: check") as found:
        make("{{ messages[0].content + 1 }}").render([{"role": "user", "content": "x"}])
    assert "str" not in str(found.value)


# ---- roles


@pytest.mark.parametrize("role", ["usr", "User", "bot", "", None, 7, "user<|im_end|>"])
def test_an_unknown_role_is_refused(role):
    with pytest.raises(RequestError, match=r"a message('s role is| has the role| has no role)"):
        make(CHATML).render([{"role": role, "content": "hi"}])


def test_a_role_that_the_template_names_is_its_own_affair():
    template = "{% for m in messages %}{% if m.role == 'critic' %}!{{ m.content }}{% endif %}{% endfor %}"
    assert make(template).render([{"role": "critic", "content": "hi"}]) == "!hi"


# ---- the system prompt that a template inserts by itself

INSERTS = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Small.<|im_end|>\n{% endif %}" + CHATML
)
DATED = "Today is Monday.\n" + CHATML  # written whatever the conversation says
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
FOLDED = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"


def test_what_the_template_inserts_is_found():
    assert make(INSERTS).inserted_system_prompt() == "You are Small."


@pytest.mark.parametrize("template", [CHATML, DATED, NO_SYSTEM, FOLDED, None, "{{ broken"])
def test_where_nothing_is_inserted_nothing_is_found(template):
    assert make(template).inserted_system_prompt() == ""
