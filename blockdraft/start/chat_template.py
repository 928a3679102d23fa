"""A chat template of the user's own, in place of the checkpoint's."""

from __future__ import annotations

from pathlib import Path

from blockdraft.errors import ModelError, SettingsError
from blockdraft.text.template import compile_template

MAX_BYTES = 1 << 20  # arbitrary; templates have some ten thousand


def read_chat_template(file: str) -> str:
    """The text of a template that parses, or SettingsError."""
    path = Path(file).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"--chat-template {file} has more than {MAX_BYTES} bytes: it is no template.")
        text = path.read_text(encoding="utf-8")
        compile_template(text)
    except OSError as error:
        raise SettingsError(f"--chat-template {file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--chat-template {file} is not UTF-8 text.") from None
    except ModelError as error:
        raise SettingsError(f"--chat-template {file}: {error}") from None
    return text
