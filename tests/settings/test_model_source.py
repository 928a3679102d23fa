"""What others know a model by."""

import pytest

from blockdraft.settings.model_source import DEFAULT_ID, public_id


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("default", DEFAULT_ID),
        ("org/name", "org/name"),
        ("org/name@main", "org/name"),
        ("./folder", "./folder"),
        ("/mnt/models/name", "/mnt/models/name"),
        ("name.gguf", "name.gguf"),
    ],
)
def test_a_model_is_known_by_its_hub_id_or_by_its_path_as_given(given, expected):
    assert public_id(given) == expected
