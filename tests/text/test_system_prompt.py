"""The system prompt that a template inserts by itself."""

import pytest

from blockdraft.text.system_prompt import inserted_system_prompt
from tests.text.test_tokenizer import CHATML, make

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
    assert inserted_system_prompt(make(INSERTS)) == "You are Small."


@pytest.mark.parametrize("template", [CHATML, DATED, NO_SYSTEM, FOLDED, None, "{{ broken"])
def test_where_nothing_is_inserted_nothing_is_found(template):
    assert inserted_system_prompt(make(template)) == ""
