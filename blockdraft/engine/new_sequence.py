"""Makes the Sequence of a request's choice: its sampling on the device, its limits, and its text."""

from __future__ import annotations

from blockdraft.cache.rows import RowSampling
from blockdraft.engine.loaded_pair import LoadedPair
from blockdraft.engine.request import Request
from blockdraft.engine.sequence import Sequence
from blockdraft.planner.plan import Plan
from blockdraft.text.detokenizer import TextStream


def new_sequence(
    request: Request, index: int, seed: int, leader: Sequence | None, *, models: LoadedPair, plan: Plan
) -> Sequence:
    """Return choice number `index` of a request that was checked. `leader`: the choice that goes first."""
    params, tokenizer = request.sampling, models.tokenizer
    num_prompt = len(request.prompt_ids)
    end_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        end_ids |= frozenset(i for i in tokenizer.eos_ids if i < models.config.vocab_size)
    max_tokens = plan.max_model_len if params.max_tokens is None else params.max_tokens
    return Sequence(
        request=request,
        index=index,
        width=plan.width if params.width is None else params.width,
        sampling=RowSampling(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            seed=seed,
            output_start=num_prompt,
            min_end=num_prompt + params.min_tokens,
            stop_ids=tuple(sorted(end_ids)),
            bias=tuple(params.logit_bias.items()),
        ),
        end_ids=end_ids,
        max_length=min(num_prompt + max_tokens, plan.max_model_len),
        stream=TextStream(
            tokenizer,
            request.prompt_ids,
            stops=params.stops,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        ),
        leader=leader,
        may_change_width=params.width is None,
    )
