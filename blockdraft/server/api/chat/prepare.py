"""Prepares requests for the engine: prompts, sampling, and how to read the answer.

Inside the server, `ChatRequest` is the only kind of conversation and `AnswerPiece` the only kind of event.
Other APIs are translated to a `ChatRequest` before `prepare_chat`, and from `AnswerPiece`s after
`PreparedChat.choices`. Encoding a long conversation takes long, so the routes run these functions
in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from blockdraft.engine.info import EngineInfo
from blockdraft.engine.request import SamplingParams, check_limits
from blockdraft.errors import RequestError
from blockdraft.grammar.endless import check_end
from blockdraft.grammar.structured_output import StructuredOutputs, Thinking
from blockdraft.server.api.chat.fields import ChatRequest, CompletionRequest, TokenizeRequest
from blockdraft.server.api.chat.messages import for_template
from blockdraft.server.api.choices import AnswerChoice, DraftMarks
from blockdraft.server.api.fields import FieldAtFault
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

MAX_SCORES = 1 << 19  # log-probabilities of prompt tokens in one answer: some 20 MB of JSON


@FieldAtFault("prompt")
def encode_prompts(asked: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    if asked.suffix:
        return [fill_in(prompt, asked, tokenizer) for prompt in asked.prompt]
    return [
        tokenizer.encode(prompt, asked.add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in asked.prompt
    ]


# Tokens that let a model fill in text: before the first text, before the second, before the model's own.
_FILL_IN_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)


def fill_in(prompt: str | list[int], asked: CompletionRequest, tokenizer: Tokenizer) -> list[int]:
    """Return a prompt to fill in text before `suffix`. Raises RequestError if the model cannot do this."""
    for tokens in _FILL_IN_TOKENS:
        first, second, own = (tokenizer.token_id(token) for token in tokens)
        if first is not None and second is not None and own is not None:
            break
    else:
        raise RequestError(
            "'suffix' needs a fill-in-the-middle model, and this one has no tokens for it: leave it out.",
            "suffix",
        )
    before = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    after = tokenizer.encode(asked.suffix or "", add_special_tokens=False)
    # Special tokens that the tokenizer puts before every text.
    start = tokenizer.encode("", add_special_tokens=True) if asked.add_special_tokens else []
    return [*start, first, *before, second, *after, own]


def echoed_texts(asked: CompletionRequest, prompts: Items[list[int]], tokenizer: Tokenizer) -> list[str]:
    """Return the prompts as text; an empty list if the request asks for no echo."""
    if not asked.echo:
        return []
    return [
        prompt if isinstance(prompt, str) else tokenizer.decode(ids, asked.skip_special_tokens)
        for prompt, ids in zip(asked.prompt, prompts, strict=True)
    ]


def token_texts(tokens: Items[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def check_tokens(tokens: Items[int], info: EngineInfo) -> None:
    """Raise RequestError for a token id outside the vocabulary, which decoding would skip silently."""
    wrong = next((token for token in tokens if token >= info.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"tokens: token id {wrong} is outside the vocabulary (0 to {info.vocab_size - 1}).", "tokens"
        )


def check_prompts(
    prompts: Items[Items[int]], fields: Mapping[str, str], sampling: SamplingParams, info: EngineInfo
) -> None:
    """Raise RequestError for prompts that the engine can never run, or more scores than an answer may hold.

    `fields` names the fields of the body that hold the prompt and the request for scores. The engine checks
    the tokens themselves.
    """
    names = {"prompt": fields["prompt"], "width": "speculative"}
    for prompt_ids in prompts:
        try:
            check_limits(
                len(prompt_ids),
                sampling,
                max_model_len=info.max_model_len,
                most_context=info.most_context,
                block=info.block,
            )
        except RequestError as error:
            raise RequestError(str(error), names.get(error.field or "", error.field), error.code) from None
    num_tokens, num_each = sampling.n * sum(map(len, prompts)), 1 + (sampling.prompt_logprobs or 0)
    if sampling.prompt_logprobs is not None and num_tokens * num_each > MAX_SCORES:
        raise RequestError(
            f"{num_tokens} tokens of prompts with {num_each} log-probabilities each are more than the "
            f"{MAX_SCORES} that one answer may hold: send fewer prompts at once, or ask for fewer each.",
            fields["scores"],
        )


@dataclass(frozen=True, slots=True)
class Dialect:
    """The format of a model's tool calls and thoughts."""

    tokenizer: Tokenizer
    tools: ToolFormat
    thoughts: Tags | None

    @property
    def has_developer(self) -> bool:
        """Return whether the model's template knows the role "developer"."""
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
        """Return the field of the request that binds the answer's format."""
        is_calls = self.asked.must_call or self.asked.structured_output is None
        return "tools" if is_calls else self.asked.output_field

    def choices(self) -> list[AnswerChoice]:
        """Return a new `AnswerChoice` for each choice of the request."""
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
    """Prepare a request for the engine. Raises RequestError. Takes long for long conversations.

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
    thinking = _thinking(asked, dialect, prompt_ids, is_inside=is_inside, is_structured=output is not None)
    is_skipping = asked.skip_special_tokens and not _shown_tags(asked, dialect)
    same = sampling.structured_outputs is output and sampling.skip_special_tokens is is_skipping
    if not same or thinking is not None:
        sampling = replace(
            sampling, structured_outputs=output, thinking=thinking, skip_special_tokens=is_skipping
        )
    return PreparedChat(asked, dialect, prompt_ids, sampling, is_inside)


@FieldAtFault("messages")
def encode_conversation(asked: ChatRequest | TokenizeRequest, dialect: Dialect) -> list[int]:
    """Return the tokens of a conversation. As in vLLM, it shows the tools even if `tool_choice` is "none".

    The model then still understands earlier calls, and the cached prefix still matches; the answer is not
    searched for calls.
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
    """Return the prompt's tokens. As in vLLM, special tokens are added to prompts, not to conversations."""
    if asked.prompt is not None:
        is_added = asked.add_special_tokens is not False
        with FieldAtFault("prompt"):
            return dialect.tokenizer.encode(asked.prompt, is_added)
    return encode_conversation(asked, dialect)


def _shown_tags(asked: ChatRequest, dialect: Dialect) -> frozenset[str]:
    """Return the special tokens that the server needs to find thoughts and calls in an answer."""
    tags: set[str] = set()
    if dialect.thoughts is not None:
        tags.update(dialect.thoughts.special)
    if asked.callable_tools or dialect.tools.find_thoughts is not None:
        tags.update(dialect.tools.tags)
    return dialect.tokenizer.special_texts & tags


def _structured_output(
    asked: ChatRequest, dialect: Dialect, output: StructuredOutputs | None
) -> StructuredOutputs | None:
    """Return the structured output of the whole answer: `output` and the grammar of tool calls.

    Calls are bound by a grammar if a call is required, a tool is strict, or `output` is set. `output` binds
    only text; an answer that must be a call has no text.
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
    """Return how to find thoughts; None unless structured output follows them or they have a token budget."""
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
