"""Options and recipes: what a stage's dataclass accepts, from where, and what it says of the rest."""

import dataclasses
import string

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlaforge.config import MANY, field_types, resolve
from mlaforge.conversion.config import ConvertConfig
from mlaforge.runtime import UserError
from support.option_classes import option_classes

CLASSES = option_classes()
PLAIN = {
    int: st.integers(-(10**9), 10**9),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    # Control characters and halves of characters cannot stand in YAML at all.
    str: st.text(string.printable[:95] + "äöü→\u3000🙂\n\t"),
    # An option that was not given is an empty list.
    MANY: st.lists(st.text(string.ascii_letters + "/:=", min_size=1), min_size=1).map(tuple),
}


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@st.composite
def valid_settings(draw):
    """A stage's dataclass and legal values for some of its fields."""
    cls = draw(st.sampled_from(CLASSES))
    kinds, values = field_types(cls), {}
    for field in draw(st.lists(st.sampled_from(dataclasses.fields(cls)), unique_by=lambda f: f.name)):
        choices = field.metadata["choices"]
        values[field.name] = draw(st.sampled_from(choices) if choices else PLAIN[kinds[field.name]])
    return cls, values


@given(valid_settings(), st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_settings_survive_any_way_in(recipe, chosen, random):
    """As options, as a recipe with either dash, split between both, and what is resolved as a recipe again."""
    cls, values = chosen
    wanted = cls(**values)
    assert resolve(cls, **values) == wanted
    path = recipe(yaml.safe_dump({random.choice((k, k.replace("_", "-"))): v for k, v in values.items()}))
    assert resolve(cls, path) == wanted
    given_as_option = {k: v for k, v in values.items() if random.random() < 0.5}
    assert resolve(cls, path, **given_as_option) == wanted
    assert resolve(cls, recipe(yaml.safe_dump(dataclasses.asdict(wanted)))) == wanted


def test_options_override_the_recipe_key_by_key(recipe):
    path = recipe("budget: 0.25\nseqlen: 64\nlayout: latent_rope\n")
    assert resolve(ConvertConfig, path, budget=0.75, seed=0) == ConvertConfig(
        budget=0.75, seqlen=64, layout="latent_rope"
    )


def test_what_is_not_given_keeps_its_default(recipe):
    assert resolve(ConvertConfig) == resolve(ConvertConfig, recipe("# nothing yet\n"), budget=None) == ConvertConfig()


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        # What YAML 1.1 takes for something else than the writer meant.
        ("refit: on", "refit", "on"),
        ("refit: off", "refit", "off"),
        ("budget: 1", "budget", 1.0),
        ("budget: 5e-1", "budget", 0.5),
        ("layers: 2", "layers", "2"),
        ("layers: 0,2,5-9", "layers", "0,2,5-9"),
        ("freqfold: 4", "freqfold", "4"),
        ("kv_lora_rank:", "kv_lora_rank", None),
    ],
)
def test_yaml_means_what_it_looks_like(line, field, value, recipe):
    found = getattr(resolve(ConvertConfig, recipe(line)), field)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bugdet: 0.5", "unknown key 'bugdet'; did you mean 'budget'?"),
        ("n_samples: 4", "unknown key 'n_samples'; did you mean 'nsamples'?"),
        ("colour: blue", "unknown key 'colour'"),
        ("budget: half", "budget = 'half' must be a number"),
        ("budget: true", "budget = True must be a number"),
        ("budget: [0.5]", "budget = [0.5] must be a number"),
        ("budget:", "budget needs a number, not nothing"),
        ("nsamples: 2.5", "nsamples = 2.5 must be a whole number"),
        ("nsamples: '4'", "nsamples = '4' must be a whole number"),
        ("nsamples: yes", "nsamples = True must be a whole number"),
        ("deepseek_style: 1", "deepseek_style = 1 must be true or false"),
        ("layers: [0, 2]", "layers = [0, 2] must be text"),
        ("layers: on", "layers = True must be text"),
        ("layout: laten", "layout = 'laten' must be one of latent, latent_rope; did you mean 'latent'?"),
        ("layout: mla", "layout = 'mla' must be one of latent, latent_rope"),
        ("refit: 1", "refit = '1' must be one of auto, on, off"),
        ("- budget", "must hold `key: value` lines, not a list"),
        ("just words", "must hold `key: value` lines, not a str"),
        ("budget: [", "is not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_bad_recipes(text, words, recipe):
    path = recipe(text)
    with pytest.raises(UserError) as told:
        resolve(ConvertConfig, path)
    line = str(told.value)
    assert line.startswith(f"recipe {path}") and "\n" not in line
    assert words in line


def test_an_option_is_checked_like_a_recipes_key():
    with pytest.raises(UserError, match="option: layout = 'laten' must be one of latent, latent_rope"):
        resolve(ConvertConfig, layout="laten")
    with pytest.raises(UserError, match="option: unknown key 'bugdet'; did you mean 'budget'"):
        resolve(ConvertConfig, bugdet=0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not YAML"),
    ],
    ids=["absent", "folder", "not text"],
)
def test_a_recipe_that_is_none(make, words, tmp_path):
    make(tmp_path / "r.yaml")
    with pytest.raises(UserError, match=words):
        resolve(ConvertConfig, tmp_path / "r.yaml")
