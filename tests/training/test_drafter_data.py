"""The prompts of the default drafter: a mixture that is the same every time, and long ones of every kind."""

import random

import pytest

from benchmarks.drafter_data import (
    BOXED,
    CHARS,
    KINDS,
    LONGEST,
    SHORTEST,
    SOLVE,
    Material,
    long_prompts,
    reworded,
    short_prompts,
)


def row(source, category, *texts):
    return {
        "source": source,
        "category": category,
        "messages": [{"role": "user", "content": text} for text in texts],
    }


DOCSTRING = '```python\ndef area(r):\n    """Area of a circle."""\n```'
CODE = "```python\ndef total(values):\n" + "    values = [value for value in values if value]\n" * 8 + "```"
POOL = [
    row("gsm8k_train", "math", "How many eggs are left?\nLet's think step by step."),
    row("py_functions", "code", f"Finish this.\n{DOCSTRING}"),
    row("py_functions", "code", f"Explain this.\n{CODE}"),
    row("self_dialogue_corpus", "dialogue", "Hello!", "And you?"),
    row("books_summarise", "summarise", "Summarise:\n\n" + "It was a dark night. " * 40),
    row("summ_k8s", "summarise", "Key points:\n\n" + "A pod is a group of containers. " * 40),
    row("seal_tools", "json", 'You have access to\n[{"name": "add"}]\nAdd one and two.'),
    row("boolq", "qa", "A bath is a tub. " * 40 + "\nis a bath a tub?"),
]


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("gsm8k_train", "How many?\nLet's think step by step.", f"How many?{BOXED}"),
        ("gsm8k_train", f"How many?{BOXED}", f"How many?{BOXED}"),
        ("py_functions", f"Finish this.\n{DOCSTRING}", SOLVE + DOCSTRING),
        ("py_functions", "Write a parser.", "Write a parser."),
    ],
)
def test_tasks_are_asked_again_in_the_words_of_benchmarks(source, before, after):
    (message,) = reworded(row(source, "code", before), random.Random(0))
    assert message == {"role": "user", "content": after}


def test_the_mixture_repeats_exactly_and_asks_some_prompts_several_times():
    first, again = (short_prompts(POOL * 20, random.Random(5)) for _ in range(2))
    assert first == again
    asked = [one["messages"][-1]["content"] for one in first]
    assert sum("eggs" in text for text in asked) == 60
    assert sum(BOXED in text for text in asked) == 40
    assert 0 < sum(text == "And you?" for text in asked) < 20
    assert any(one["messages"][0]["role"] == "system" for one in first)


def test_long_prompts_are_of_every_kind_and_as_long_as_they_should_be():
    found = long_prompts(Material(POOL), 4 * len(KINDS), random.Random(1))
    assert {one["category"] for one in found} == {f"long-{name}" for name in KINDS}
    assert found == long_prompts(Material(POOL), 4 * len(KINDS), random.Random(1))
    for one in found:
        size = len(one["messages"][0]["content"])
        assert 0.6 * SHORTEST * CHARS < size < 1.5 * LONGEST * CHARS
