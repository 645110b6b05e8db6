"""Options and recipes: legal values from every source, and the messages for illegal ones."""

import dataclasses
import string

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlaforge.config import Options, field_types, item_type, option, resolve
from mlaforge.conversion.config import ConvertConfig
from mlaforge.engine.config import EngineConfig
from mlaforge.healing.config import HealConfig
from mlaforge.runtime import UserError
from support.option_classes import option_classes

CLASSES = option_classes()


@dataclasses.dataclass(frozen=True)
class Example(Options):
    """One field of each kind that has a text form."""

    share: float = option(0.5, "", least=0, below=1)
    above: float | None = option(None, "", above=0)
    few: int = option(1, "", least=1, most=8)
    lengths: tuple[int, ...] = option((512,), "", least=48)
    depths: tuple[float, ...] | None = option(None, "", least=0, most=1)
    kinds: tuple[str, ...] = option(("a",), "", choices=("a", "b"))
    names: tuple[str, ...] = option(("x",), "")
    paths: tuple[str, ...] | None = option(None, "", repeat=True)


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def legal_values(kind, bounds, listed):
    """Strategy for the values of a type within bounds."""
    low, high = (bounds.get(a, bounds.get(b)) for a, b in (("at least", "above"), ("at most", "below")))
    if kind is int:
        return st.integers(-(10**9) if low is None else low, 10**9 if high is None else high)
    if kind is float:
        ends = {"exclude_min": "above" in bounds, "exclude_max": "below" in bounds}
        return st.floats(low, high, allow_nan=False, allow_infinity=False, **ends)
    if kind is bool:
        return st.booleans()
    if listed:
        return st.text(string.ascii_letters + "/:=", min_size=1)
    # YAML allows no control characters or lone surrogates.
    return st.text(string.printable[:95] + "äöü→\u3000🙂\n\t")


@st.composite
def valid_settings(draw):
    """A stage's dataclass and legal values for some of its fields."""
    cls = draw(st.sampled_from(CLASSES))
    kinds, values = field_types(cls), {}
    for field in draw(st.lists(st.sampled_from(dataclasses.fields(cls)), unique_by=lambda f: f.name)):
        choices, item = field.metadata["choices"], item_type(kinds[field.name])
        bounds = field.metadata["bounds"]
        value = st.sampled_from(choices) if choices else legal_values(item or kinds[field.name], bounds, item)
        values[field.name] = draw(st.lists(value, min_size=1).map(tuple) if item else value)
    return cls, values


@given(valid_settings(), st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_are_the_same_from_options_and_recipes(recipe, chosen, random):
    """As options, as a recipe with dashes or underscores, split between both, and dumped and read again."""
    cls, values = chosen
    expected = cls(**values)
    assert resolve(cls, **values) == expected
    path = recipe(yaml.safe_dump({random.choice((k, k.replace("_", "-"))): v for k, v in values.items()}))
    assert resolve(cls, path) == expected
    overrides = {k: v for k, v in values.items() if random.random() < 0.5}
    assert resolve(cls, path, **overrides) == expected
    assert resolve(cls, recipe(yaml.safe_dump(dataclasses.asdict(expected)))) == expected


def test_options_override_the_recipe_key_by_key(recipe):
    path = recipe("budget: 0.25\nseqlen: 64\nlayout: latent_rope\n")
    assert resolve(ConvertConfig, path, budget=0.75, seed=0) == ConvertConfig(
        budget=0.75, seqlen=64, layout="latent_rope"
    )


def test_unset_options_keep_their_defaults(recipe):
    assert resolve(ConvertConfig) == resolve(ConvertConfig, recipe("# nothing yet\n"), budget=None) == ConvertConfig()


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        # Text that YAML 1.1 reads as another type than intended.
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
def test_yaml_values_get_the_type_of_their_field(line, field, value, recipe):
    resolved = getattr(resolve(ConvertConfig, recipe(line)), field)
    assert (resolved, type(resolved)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bugdet: 0.5", "unknown key 'bugdet'; did you mean 'budget'?"),
        ("n_samples: 4", "unknown key 'n_samples'; did you mean 'nsamples'?"),
        ("colour: blue", "unknown key 'colour'"),
        ("budget: half", "budget = 'half' must be a number"),
        ("budget: true", "budget = True must be a number"),
        ("budget: [0.5]", "budget = [0.5] must be a number"),
        ("nsamples:", "nsamples needs a whole number, not nothing"),
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
        ("budget: 0.5\nseed: 1\nbudget: 0.25", "budget is given twice (line 3); give it once"),
        ("kv_lora_rank: 8\nkv-lora-rank: 16", "kv-lora-rank is given twice (line 2)"),
        ("budget: {a: 1, a: 2}", "a is given twice (line 1)"),
        pytest.param("[" * 100000, "is not YAML", id="deep"),
        pytest.param("seed: " + "9" * 5000, "is not YAML", id="endless number"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_bad_recipes(text, message, recipe):
    path = recipe(text)
    with pytest.raises(UserError) as error:
        resolve(ConvertConfig, path)
    line = str(error.value)
    assert line.startswith(f"recipe {path}") and "\n" not in line
    assert message in line


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("lengths: 512,2048", "lengths", (512, 2048)),
        ("lengths: 8k, 1m", "lengths", (8192, 1048576)),
        ("lengths: 512", "lengths", (512,)),
        ("lengths: [512, 8k]", "lengths", (512, 8192)),
        ("depths: 0,0.5, 1", "depths", (0.0, 0.5, 1.0)),
        ("depths: [0, 5e-1]", "depths", (0.0, 0.5)),
        ("kinds: b,a,b", "kinds", ("b", "a", "b")),
        ("names: a b, 5", "names", ("a b", "5")),
        ("names: 5", "names", ("5",)),
        ("paths: a,b", "paths", ("a,b",)),
        ("paths: [a, 'b,c']", "paths", ("a", "b,c")),
    ],
)
def test_lists_are_text_with_commas_or_yaml_lists(text, field, value, recipe):
    config = resolve(Example, recipe(text))
    assert config == Example(**{field: value})
    assert list(map(type, getattr(config, field))) == list(map(type, value))
    # Python accepts the text form, too.
    assert Example(**yaml.safe_load(text)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"few": 0}, "few = 0 must be at least 1 and at most 8"),
        ({"few": 9}, "few = 9 must be at least 1 and at most 8"),
        ({"few": True}, "few = True must be a whole number"),
        ({"share": 1.0}, "share = 1.0 must be at least 0 and below 1"),
        ({"share": float("nan")}, "share = nan must be at least 0 and below 1"),
        ({"above": float("inf")}, "above = inf must be a finite number"),
        ({"share": 10**400}, "must be a number"),
        ({"above": 0.0}, "above = 0.0 must be above 0"),
        ({"lengths": "512,47"}, "lengths = 47 must be at least 48"),
        ({"lengths": "512,"}, "lengths = '512,' must be whole numbers with commas between"),
        ({"lengths": "512,2.5"}, "lengths = '512,2.5' must be whole numbers with commas between"),
        ({"lengths": (512, 2.5)}, r"lengths = \(512, 2.5\) must be whole numbers with commas between"),
        ({"lengths": ()}, r"lengths = \(\) must be whole numbers with commas between"),
        ({"lengths": None}, "lengths needs whole numbers with commas between, not nothing"),
        ({"depths": "0,2"}, "depths = 2.0 must be at least 0 and at most 1"),
        ({"depths": "0,x"}, "depths = '0,x' must be numbers with commas between"),
        ({"kinds": "a,c"}, "kinds = 'c' must be one of a, b"),
        ({"names": "a,,b"}, "names = 'a,,b' must be words with commas between"),
        ({"paths": {"a": 1}}, "paths = {'a': 1} must be text, or a list of it"),
    ],
)
def test_illegal_values_are_refused_from_every_source(values, message, recipe):
    for make in (lambda: Example(**values), lambda: dataclasses.replace(Example(), **values)):
        with pytest.raises(UserError, match=f"^.{{0,500}}{message}$") as refused:
            make()
        assert "\n" not in str(refused.value)
    path = recipe(yaml.safe_dump({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}))
    with pytest.raises(UserError, match=f"^recipe {path}: "):
        resolve(Example, path)


def test_stages_declare_their_bounds():
    for make, message in (
        (lambda: EngineConfig(block_size=0), "block_size = 0 must be at least 1"),
        (lambda: EngineConfig(num_speculative_tokens=9), "num_speculative_tokens = 9 must be at least 1 and at most 8"),
        (lambda: HealConfig(steps=-1), "steps = -1 must be at least 0"),
        (lambda: HealConfig(seqlen="512,47"), "seqlen = 47 must be at least 48"),
        (lambda: ConvertConfig(budget=1.5), "budget = 1.5 must be above 0 and at most 1"),
        (lambda: ConvertConfig(layout="laten"), "layout = 'laten' must be one of latent, latent_rope"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            make()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_classes_with_more_than_five_options_list_five_basic_ones(cls):
    names = [field.name for field in dataclasses.fields(cls)]
    assert set(cls.first) <= set(names) and len(set(cls.first)) == len(cls.first)
    # EngineConfig is a part of several verbs' options, not a verb's own.
    assert len(cls.first) == (5 if len(names) > 5 and cls is not EngineConfig else 0)


def test_command_line_options_are_checked_like_recipe_keys():
    with pytest.raises(UserError, match=r"^layout = 'laten' must be one of latent, latent_rope"):
        resolve(ConvertConfig, layout="laten")
    with pytest.raises(UserError, match=r"^unknown key 'bugdet'; did you mean 'budget'"):
        resolve(ConvertConfig, bugdet=0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not YAML"),
    ],
    ids=["absent", "folder", "not text"],
)
def test_rejects_unreadable_recipes(make, message, tmp_path):
    make(tmp_path / "r.yaml")
    with pytest.raises(UserError, match=message):
        resolve(ConvertConfig, tmp_path / "r.yaml")
