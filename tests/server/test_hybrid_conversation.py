"""A conversation with a hybrid model by OpenAI's client: its past is read once, and answers stay the same."""

from dataclasses import replace

from tests.lossless import families
from tests.models.families import CASES
from tests.server.pair import NAME, client_of


def test_each_turn_continues_from_the_state_at_the_end_of_the_last_answer():
    pair = families.make_pair(*CASES["qwen3_next-whole"], seed=1, max_model_len=300)
    models, plan = pair
    assert (plan.state_grid, plan.page_size) == (64, 16)
    [(prompt, params)] = families.make_requests((130,), max_tokens=40)
    cached = []
    with client_of(models, plan=plan) as client:
        for turn in range(3):
            [[(token_ids, text, _)]] = families.plain(pair, [(prompt, replace(params, temperature=0.0))])
            answer = client.completions.create(
                model=NAME, prompt=prompt, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].text == text
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            prompt = [*prompt, *token_ids, turn]
    assert cached == [0, (130 + 39) // 64 * 64, (171 + 39) // 64 * 64]
