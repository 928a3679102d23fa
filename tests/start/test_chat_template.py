"""--chat-template: a file in place of the checkpoint's own template."""

import pytest

from blockdraft.errors import SettingsError
from blockdraft.settings.settings import Settings
from blockdraft.start.loading import open_models
from blockdraft.start.preflight import check_native
from tests.server.pair import PAIR


def test_a_file_takes_the_place_of_the_models_own(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("t7 {{ messages[0].content }}")
    settings = Settings(model=str(PAIR / "target"), draft="none", device="cpu", chat_template=str(file))
    tokenizer = open_models(settings, lambda _: None).target.tokenizer
    assert tokenizer.render([{"role": "user", "content": "t1"}]) == "t7 t1"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "cannot be read"),
        (b"\xff", "not UTF-8"),
        (b"{% if %}", "does not parse"),
        (b" " * 2**21, "bytes"),
    ],
)
def test_a_file_that_is_no_template_is_refused_before_anything_is_loaded(tmp_path, content, part):
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=part):
        check_native(Settings(chat_template=str(file)))
