import pytest

from router.prompts.served import ServedModels


@pytest.mark.parametrize(
    ("cards", "served"),
    [
        ([], None),
        ([{"object": "model"}], None),
        ([{"id": "m"}], ServedModels(frozenset({"m"}), frozenset(), None)),
        (
            [{"id": "m", "parent": None, "max_model_len": 8}, {"id": "alias", "max_model_len": 4}, {"id": "fine", "parent": "m"}],
            ServedModels(frozenset({"m", "alias"}), frozenset({"fine"}), 4),
        ),
    ],
)
def test_what_a_list_of_models_says(cards, served):
    assert ServedModels.of(cards) == served
