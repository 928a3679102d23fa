"""Roles: those that every template writes and those it names itself; any other is a mistake."""

import pytest

from blockdraft.errors import RequestError
from tests.text.test_tokenizer import CHATML, make


@pytest.mark.parametrize("role", ["usr", "User", "bot", "", None, 7, "user<|im_end|>"])
def test_an_unknown_role_is_refused(role):
    with pytest.raises(RequestError, match=r"a message('s role is| has the role| has no role)"):
        make(CHATML).render([{"role": role, "content": "hi"}])


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_known_roles_are_written(role):
    assert f"<|im_start|>{role}\nhi" in make(CHATML).render([{"role": role, "content": "hi"}])


def test_a_role_that_the_template_names_is_its_own_affair():
    template = "{% for m in messages %}{% if m.role == 'critic' %}!{{ m.content }}{% endif %}{% endfor %}"
    assert make(template).render([{"role": "critic", "content": "hi"}]) == "!hi"
