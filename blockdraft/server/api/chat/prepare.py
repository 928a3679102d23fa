"""Prepares a chat request for the engine: prompt, sampling, and how to read the answer.

`ChatRequest` is the one request and `AnswerPiece` the one stream of events inside the server. Other APIs are
translations: into the first in front of `prepare_chat`, out of the second behind `PreparedChat.choices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from blockdraft.engine.request import SamplingParams
from blockdraft.grammar.endless import check_end
from blockdraft.grammar.structured_output import StructuredOutputs, Thinking
from blockdraft.server.api.chat.fields import ChatRequest, CompletionRequest, TokenizeRequest
from blockdraft.server.api.chat.template_messages import for_template
from blockdraft.server.api.choices import AnswerChoice, DraftMarks
from blockdraft.server.api.fields import field_at_fault
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.tool_calls.bare_json import tools_as_messages
from blockdraft.tool_calls.formats import ToolFormat, find_format
from blockdraft.tool_calls.lark import CallRules
from blockdraft.tool_calls.reading import TagFilter, TagFinder
from blockdraft.tool_calls.thoughts import (
    Splitter,
    Tags,
    ThoughtCounter,
    begins_behind,
    begins_inside,
    continues_inside,
    find_tags,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes tool calls and thoughts."""

    tokenizer: Tokenizer
    tools: ToolFormat
    thoughts: Tags | None

    @property
    def has_developer(self) -> bool:
        """Whether its template knows this role."""
        return "developer" in (self.tokenizer.chat_template or "")


def find_dialect(tokenizer: Tokenizer, tool_format: str = "auto") -> Dialect:
    tools = find_format(tokenizer, tool_format)
    find = find_tags if tools.find_thoughts is None else tools.find_thoughts
    return Dialect(tokenizer, tools, find(tokenizer))


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A request that the engine can run."""

    asked: ChatRequest
    dialect: Dialect
    prompt_ids: list[int]
    sampling: SamplingParams
    is_inside: bool  # the answer begins inside its thoughts

    @property
    def output_field(self) -> str:
        """The field that binds the answer."""
        is_calls = self.asked.must_call or self.asked.structured_output is None
        return "tools" if is_calls else self.asked.output_field

    def choices(self) -> list[AnswerChoice]:
        """A choice for each answer, ready for the engine's deltas."""
        return [self._choice(index) for index in range(self.asked.n)]

    def _choice(self, index: int) -> AnswerChoice:
        asked, dialect = self.asked, self.dialect
        drafts = draft_marks(asked, dialect.tokenizer, self.prompt_ids)
        choice = AnswerChoice(index=index, prompt=0, drafts=drafts)
        shown = _shown_tags(asked, dialect)
        if shown and asked.skip_special_tokens:
            choice.markup = TagFilter(TagFinder(dialect.tokenizer.special_texts - shown))
        if dialect.thoughts is not None:
            choice.counter = ThoughtCounter(dialect.thoughts, dialect.tokenizer, is_inside=self.is_inside)
            if dialect.tools.find_thoughts is None:
                choice.splitter = Splitter(dialect.thoughts, is_inside=self.is_inside)
        if asked.callable_tools or dialect.tools.find_thoughts is not None:
            choice.tools = {tool.name: tool for tool in asked.callable_tools}
            choice.reader = dialect.tools.reader(
                choice.tools,
                hidden=shown if asked.skip_special_tokens else (),
                max_calls=None if asked.parallel_tool_calls else 1,
            )
        return choice


def draft_marks(
    asked: ChatRequest | CompletionRequest, tokenizer: Tokenizer, prompt_ids: Items[int]
) -> DraftMarks | None:
    if not asked.speculative.detail:
        return None
    return DraftMarks(tokenizer, prompt_ids, skip_special_tokens=asked.skip_special_tokens)


def prepare_chat(asked: ChatRequest, dialect: Dialect, defaults: Mapping[str, float]) -> PreparedChat:
    """Prepare a request. Raises RequestError. Takes long for long conversations.

    `defaults` are the model's own sampling parameters.
    """
    sampling = asked.sampling(defaults)
    prompt_ids = encode_conversation(asked, dialect)
    tags, is_inside = dialect.thoughts, False
    if tags is not None and asked.continue_final_message:
        is_inside = continues_inside(tags, asked.messages[-1])
    elif tags is not None:
        is_inside = begins_inside(tags, dialect.tokenizer, prompt_ids)
    output = _structured_output(asked, dialect, sampling.structured_outputs)
    sampling = replace(
        sampling,
        structured_outputs=output,
        thinking=_thinking(asked, dialect, prompt_ids, is_inside=is_inside, is_structured=output is not None),
        skip_special_tokens=asked.skip_special_tokens and not _shown_tags(asked, dialect),
    )
    return PreparedChat(asked, dialect, prompt_ids, sampling, is_inside)


@field_at_fault("messages")
def encode_conversation(asked: ChatRequest | TokenizeRequest, dialect: Dialect) -> list[int]:
    """The prompt. Tools are shown whatever `tool_choice` says, as vLLM does.

    So with "none" the model still understands a conversation that used tools, and the cached prefix still
    matches; the answer is then not searched for calls.
    """
    if isinstance(asked, ChatRequest):
        is_added, options = False, dict(asked.template_kwargs)
    else:
        is_added, options = bool(asked.add_special_tokens), dict(asked.chat_template_kwargs)
    messages = for_template(asked.messages or [], has_developer=dialect.has_developer)
    if not dialect.tools.has_template:
        messages = tools_as_messages(messages, [one.tool for one in asked.tools])
    elif asked.tools:
        options["tools"] = [one.shown for one in asked.tools]
    return dialect.tokenizer.encode_chat(
        messages,
        add_special_tokens=is_added,
        split_special_tokens=asked.split_special_tokens,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **options,
    )


def tokenize(asked: TokenizeRequest, dialect: Dialect) -> list[int]:
    """The tokens. As in vLLM, special ones are added to prompts but not to conversations by default."""
    if asked.prompt is not None:
        is_added = asked.add_special_tokens is not False
        with field_at_fault("prompt"):
            return dialect.tokenizer.encode(asked.prompt, is_added)
    return encode_conversation(asked, dialect)


def _shown_tags(asked: ChatRequest, dialect: Dialect) -> frozenset[str]:
    """Special tokens that the server needs in the answer's text to find thoughts and calls."""
    tags: set[str] = set()
    if dialect.thoughts is not None:
        tags.update(dialect.thoughts.special)
    if asked.callable_tools or dialect.tools.find_thoughts is not None:
        tags.update(dialect.tools.tags)
    return dialect.tokenizer.special_texts & tags


def _structured_output(
    asked: ChatRequest, dialect: Dialect, output: StructuredOutputs | None
) -> StructuredOutputs | None:
    """The structured output of the whole answer: `output` and the grammar of tool calls.

    Calls are bound if one is demanded, if a tool is strict, or if `output` is set. That binds text only: an
    answer that must be a call has none.
    """
    tools = asked.callable_tools
    if asked.must_call:
        output = None
    is_bound = asked.must_call or output is not None or any(tool.is_strict for tool in tools)
    if output is not None and (output.grammar is not None or not tools):
        return dialect.tools.wrap_output(output, dialect.tokenizer)
    if not tools or not is_bound:
        return None
    for tool in tools:
        if asked.must_call or tool.is_strict:
            check_end(tool.parameters, "tools")
    rules = CallRules(
        tools=tools,
        is_required=asked.must_call,
        is_parallel=asked.parallel_tool_calls and dialect.tools.is_parallel,
        other=output,
    )
    return StructuredOutputs(grammar=dialect.tools.grammar(rules, dialect.tokenizer))


def _thinking(
    asked: ChatRequest, dialect: Dialect, prompt_ids: Items[int], *, is_inside: bool, is_structured: bool
) -> Thinking | None:
    """The thoughts, if the engine has to know them: for structured output behind them, or for a budget."""
    tags = dialect.thoughts
    if tags is None or not (is_structured or asked.thinking_token_budget is not None):
        return None
    if asked.continue_final_message and not is_inside:
        return None
    if not is_inside and begins_behind(tags, dialect.tokenizer, prompt_ids):
        return None
    return Thinking(
        open_ids=() if is_inside else tags.open_ids,
        close_ids=tags.close_ids,
        max_tokens=asked.thinking_token_budget,
    )
