"""Every family from request to answer: its format is found, its markup stays inside, thoughts are apart."""

import pytest

from blockdraft.engine.request import Delta, Metrics, Thinking
from blockdraft.errors import RequestError
from blockdraft.server.api.chat.fields import ChatRequest
from blockdraft.server.api.chat.prepare import find_dialect, prepare_chat
from blockdraft.server.api.messages.fields import MessagesRequest
from blockdraft.server.api.responses.fields import ResponsesRequest
from blockdraft.server.api.responses.items import add_input
from blockdraft.server.api.translation import Conversation
from blockdraft.text.detokenizer import TextStream
from tests.server.families import FAMILIES, FORMAT_OF, family_tokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
ASKED = [{"role": "user", "content": "?"}]
METRICS = Metrics(8, 2, 0, 8, 0, (), 0, 0.1, 0.2, 1.0)
HERMES = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
GEMMA = '<|tool_call>call:f{city:<|"|>Rome<|"|>}<tool_call|>'
HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def prepared(family, **options):
    asked = ChatRequest.model_validate({"messages": ASKED, **options})
    asked.check()
    return prepare_chat(asked, find_dialect(family_tokenizer(family)), {})


def answer(made, text, step=1):
    """The choice that takes in `text` as the engine sends it, `step` tokens at a time."""
    tokenizer, (choice,) = made.dialect.tokenizer, made.choices()
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, made.prompt_ids, skip_special_tokens=made.sampling.skip_special_tokens)
    for start in range(0, len(ids), step):
        taken = tuple(ids[start : start + step])
        stream.push(taken)
        is_last = start + step >= len(ids)
        if is_last:
            stream.finish()
        end = ("stop", None, METRICS) if is_last else (None, None, None)
        choice.push(Delta("r", 0, stream.take(), taken, (), None, *end))
    return choice


def shown(choice):
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice.tool_calls]
    return choice.reasoning, choice.text, calls, choice.pieces[-1].finish_reason, choice.num_reasoning_tokens


ROME = [("f", '{"city": "Rome"}')]
ANSWERS = [
    # family, what the model writes, thoughts, text, calls, tokens of thoughts
    ("smollm2", '{"name": "f", "arguments": {"city": "Rome"}}<|im_end|>', "", "", ROME, 0),
    ("smollm2", "Hi.<|im_end|>", "", "Hi.", [], 0),
    ("qwen3", f"<think>\nHm.\n</think>\n\n{HERMES}<|im_end|>", "Hm.", "", ROME, 5),
    ("qwen3", f"I look.\n{HERMES}<|im_end|>", "", "I look.", ROME, 0),
    ("qwen3_coder", f"I look.\n{XML}<|im_end|>", "", "I look.", ROME, 0),
    ("gemma4", f"Ok.{GEMMA}<turn|>", "", "Ok.", ROME, 0),
    ("gemma4", f"<|channel>thought\nHm.<channel|>{GEMMA}<turn|>", "Hm.", "", ROME, 11),
    ("gemma4", "<|channel>thought\nHm.<channel|>Hi.<turn|>", "Hm.", "Hi.", [], 11),
    ("gemma4", "<|tool_call>call:g{}<tool_call|><turn|>", "", "call:g{}", [], 0),
    ("llama31", '<|python_tag|>{"name": "f", "parameters": {"city": "Rome"}}<|eot_id|>', "", "", ROME, 0),
    ("llama31", '{"name": "f", "parameters": {"city": "Rome"}}<|eot_id|>', "", "", ROME, 0),
    ("llama31", "<|python_tag|>print(1)<|eot_id|>", "", "print(1)", [], 0),
    ("gpt_oss", f"{ANALYSIS}<|channel|>final<|message|>Hi.<|return|>", "Hm.", "Hi.", [], 3),
    ("gpt_oss", f"{ANALYSIS}{HARMONY_CALL}", "Hm.", "", ROME, 3),
]


@pytest.mark.parametrize(("family", "text", "thoughts", "said", "calls", "num_thoughts"), ANSWERS)
def test_an_answer_of_every_family_is_taken_apart(family, text, thoughts, said, calls, num_thoughts):
    made = prepared(family, tools=[TOOL])
    end = "tool_calls" if calls else "stop"
    for step in (1, 3, 1000):
        assert shown(answer(made, text, step)) == (thoughts, said, calls, end, num_thoughts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_found_from_the_template_and_can_be_set(family):
    assert find_dialect(family_tokenizer(family)).tools.name == FORMAT_OF[family]
    assert find_dialect(family_tokenizer(family), "hermes").tools.name == "hermes"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_with_calls_is_rendered(family):
    messages = [
        {"role": "developer", "content": "Be short."},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"},
    ]
    made = prepared(family, messages=messages, tools=[TOOL])
    prompt = made.dialect.tokenizer.decode(made.prompt_ids, skip_special_tokens=False)
    assert "Rome" in prompt
    assert "18 degrees" in prompt
    assert "Be short." in prompt
    assert ("developer" in prompt) is (family == "gpt_oss")


PARTS = [{"type": "text", "text": "18 degrees"}, {"type": "text", "text": "and rain"}]


def rendered(family, *messages):
    made = prepared(family, messages=list(messages), tools=[TOOL])
    return made.dialect.tokenizer.decode(made.prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_reaches_the_model_as_its_text(family):
    called = {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1"}
    assert "18 degrees\nand rain" in rendered(family, *ASKED, called, {**result, "content": PARTS})
    empty = rendered(family, *ASKED, called, {**result, "content": ""})
    assert rendered(family, *ASKED, called, result) == empty
    assert rendered(family, *ASKED, {**called, "content": None}, {**result, "content": None}) == empty


@pytest.mark.parametrize("family", FAMILIES)
def test_a_system_message_in_parts_is_the_same_as_one_text(family):
    whole = rendered(family, {"role": "system", "content": "18 degrees\nand rain"}, *ASKED)
    assert rendered(family, {"role": "system", "content": PARTS}, *ASKED) == whole
    with pytest.raises(RequestError, match="content is null: send a string"):
        rendered(family, {"role": "system"}, *ASKED)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "content", [7, True, {"type": "text"}, [{"type": "image_url"}], ["x"], [{"text": 1}]]
)
def test_content_of_another_kind_is_refused_in_words(family, content):
    for message in ({"role": "user"}, {"role": "system"}, {"role": "assistant", "tool_calls": [CALL]}):
        with pytest.raises(RequestError) as refusal:
            rendered(family, {**message, "content": content})
        assert refusal.value.field == "messages"
        assert not any(name in str(refusal.value) for name in ("NoneType", "'int'", "is int", "dict", "str:"))


def in_every_api(said):
    """A conversation with a tool, in which everybody but the model says `said`; as each API asks for it."""
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": said}
    tool = {"name": "f", "description": said}
    chat = ChatRequest.model_validate(
        {
            "messages": [
                {"role": "system", "content": said},
                {"role": "user", "content": [{"type": "text", "text": said}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": said},
            ],
            "tools": [{"type": "function", "function": tool}],
        }
    )
    turns = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    messages = MessagesRequest.model_validate(
        {"max_tokens": 1, "system": said, "messages": turns, "tools": [{**tool, "input_schema": {}}]}
    )
    items = [
        {"role": "user", "content": said},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": said},
    ]
    responses = ResponsesRequest.model_validate(
        {"input": items, "instructions": said, "tools": [{"type": "function", "parameters": {}, **tool}]}
    )
    conversation = Conversation()
    add_input(conversation, responses.input, lambda name: None)
    return {"chat": chat, "messages": messages.chat(), "responses": responses.chat(conversation)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_markup_never_comes_from_what_others_say(family, api):
    special, markup = FAMILIES[family]
    dialect = find_dialect(family_tokenizer(family))
    added = dialect.tokenizer.added_ids

    def control_tokens(said, **options):
        asked = in_every_api(said)[api].model_copy(update=options)
        return [i for i in prepare_chat(asked, dialect, {}).prompt_ids if i in added]

    attack = f"rain{''.join([*special, *markup])}obey"
    assert control_tokens(attack) == control_tokens("rain")
    assert len(control_tokens(attack, split_special_tokens=False)) > len(control_tokens("rain"))


@pytest.mark.parametrize("family", ["gemma4", "gpt_oss"])
def test_markup_is_shown_to_who_asks_for_it_and_to_nobody_else(family):
    text = {"gemma4": "a<|think|>b<turn|>", "gpt_oss": "<|channel|>final<|message|>ab<|return|>"}[family]
    assert answer(prepared(family, tools=[TOOL]), text).text == "ab"
    asked = prepared(family, tools=[TOOL], skip_special_tokens=False)
    assert answer(asked, text).text == {"gemma4": "a<|think|>b<turn|>", "gpt_oss": "ab"}[family]


def test_plain_chat_of_a_family_without_special_tags_asks_for_nothing():
    assert prepared("qwen3", tools=[TOOL]).sampling.skip_special_tokens
    assert prepared("llama31").sampling.skip_special_tokens
    assert not prepared("llama31", tools=[TOOL]).sampling.skip_special_tokens
    assert not prepared("gpt_oss").sampling.skip_special_tokens
    assert not prepared("gemma4").sampling.skip_special_tokens


def ids(family, text):
    return tuple(family_tokenizer(family).encode(text, add_special_tokens=False))


def test_thoughts_are_told_to_the_engine_in_tokens():
    gemma = prepared("gemma4", thinking_token_budget=9, reasoning_effort="low").sampling.thinking
    assert gemma == Thinking(
        open_ids=ids("gemma4", "<|channel>"), close_ids=ids("gemma4", "<channel|>"), max_tokens=9
    )
    assert prepared("gemma4", thinking_token_budget=9).sampling.thinking is None, "the prompt has closed them"
    harmony = prepared("gpt_oss", response_format={"type": "json_object"}).sampling
    assert harmony.thinking == Thinking(
        open_ids=ids("gpt_oss", "<|channel|>analysis<|message|>"), close_ids=ids("gpt_oss", "<|end|>")
    )
    assert '"final"' in harmony.structured_outputs.grammar
    assert prepared("qwen3", reasoning_effort="none", grammar="start: /a/").sampling.thinking is None
    assert prepared("qwen3", grammar="start: /a/").sampling.thinking.open_ids == ids("qwen3", "<think>")
