"""Recipes: schedules, limits, and the paper's numbers."""

import dataclasses
import math

import pytest

from quill.model.errors import ConfigError
from quill.model.network.presets import PRESETS
from quill.model.training.recipes import RECIPES, Recipe, paper_learning_rate


def make_recipe(**changes: object) -> Recipe:
    recipe = Recipe(num_steps=100, batch_tokens=64, learning_rate=1.0, warmup_steps=10)
    return dataclasses.replace(recipe, **changes)  # type: ignore[arg-type]


def test_every_preset_has_a_recipe() -> None:
    assert set(RECIPES) == set(PRESETS)


def test_warm_up_rises_in_equal_parts_to_the_peak() -> None:
    recipe = make_recipe()
    assert [recipe.learning_rate_at(step) for step in range(10)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    )


def test_cosine_falls_from_the_peak_to_the_final_fraction() -> None:
    recipe = make_recipe(final_fraction=0.1)
    assert recipe.learning_rate_at(10) == pytest.approx(1.0)
    assert recipe.learning_rate_at(55) == pytest.approx(0.55)
    assert recipe.learning_rate_at(100) == pytest.approx(0.1)


@pytest.mark.parametrize("step", [1, 100, 4000, 4001, 50_000])
def test_inverse_sqrt_is_the_papers_formula(step: int) -> None:
    recipe = RECIPES["transformer-base"]
    expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert recipe.learning_rate_at(step - 1) == pytest.approx(expected)


def test_the_papers_recipe_is_the_papers() -> None:
    recipe = RECIPES["transformer-base"]
    assert (recipe.beta1, recipe.beta2, recipe.adam_eps) == (0.9, 0.98, 1e-9)
    assert (recipe.warmup_steps, recipe.label_smoothing) == (4000, 0.1)
    assert paper_learning_rate(512, 4000) == pytest.approx(6.99e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps", 0),
        ("batch_tokens", 0),
        ("num_micro_batches", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("warmup_steps", -1),
        ("label_smoothing", 1.0),
        ("weight_decay", -0.1),
        ("max_gradient_norm", 0.0),
        ("schedule", "linear"),
        ("seed", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        make_recipe(**{name: value})
