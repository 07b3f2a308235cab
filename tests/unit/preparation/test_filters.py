import pytest

from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError
from diffusion.preparation.config import FiltersConfig
from diffusion.preparation.selection.filters import SampleFacts, build_filters


class TallImages:
    """A filter of the user's own."""

    def __init__(self, most: float) -> None:
        self.most = most

    def __call__(self, sample: SampleFacts) -> str | None:
        return "too tall" if sample.height > self.most * sample.width else None


def returns_a_number():
    return lambda sample: 3


def not_callable():
    return 3


def filters(**values):
    return build_filters(from_dict(FiltersConfig, values, "test"))


def refusal(sample: SampleFacts, **values) -> tuple[str, str] | None:
    """Name and detail of the first filter that refuses."""
    found = ((one.name, one.refuse(sample)) for one in filters(**values))
    return next(((name, detail) for name, detail in found if detail is not None), None)


def sample(*captions: str, width: int = 640, height: int = 480, **metadata) -> SampleFacts:
    captions = captions or ("a red dog",)
    return SampleFacts(key="s/1", width=width, height=height, captions=list(captions), metadata=metadata)


def test_nothing_asked_nothing_refused():
    assert filters() == []


@pytest.mark.parametrize(
    ("one", "asked", "expected"),
    [
        (sample(width=300, height=200), {"min_shorter_side": 200}, None),
        (sample(width=300, height=199), {"min_shorter_side": 200}, ("shorter_side", "199 px < 200")),
        (sample(width=300, height=100), {"max_aspect_ratio": 3.0}, None),
        (sample(width=99, height=300), {"max_aspect_ratio": 3}, ("aspect_ratio", "3.0303 > 3")),
        (sample("four"), {"min_caption_characters": 4, "max_caption_characters": 4}, None),
        (sample("four", "me"), {"min_caption_characters": 3}, ("caption_characters", "2 characters < 3")),
        (sample("a", "a  b\nc"), {"max_caption_words": 2}, ("caption_words", "3 words > 2")),
        (sample(aesthetic=4.5), {"min_aesthetic": 4.5}, None),
        (sample(aesthetic=4.4999), {"min_aesthetic": 4.5}, ("aesthetic", "4.4999 < 4.5")),
        (sample(aesthetic="4.7"), {"min_aesthetic": 4.5}, None),
        (sample(aesthetic="good"), {"min_aesthetic": 4.5}, ("aesthetic", "aesthetic is 'good', which is not a number")),
        (sample(aesthetic=True), {"min_aesthetic": 0}, ("aesthetic", "aesthetic is 'True', which is not a number")),
        (sample(laion=5), {"min_aesthetic": 4.5, "aesthetic_column": "laion"}, None),
        (sample(language="EN "), {"languages": ["en", "de"]}, None),
        (sample(language="fr"), {"languages": ["en", "de"]}, ("language", "'fr'")),
        (sample(license="cc0"), {"licences": ["CC0"]}, None),
        (sample(license="all rights reserved"), {"licences": ["CC0"]}, ("licence", "'all rights reserved'")),
        (sample(pwatermark=0.8), {"conditions": [{"column": "pwatermark", "max": 0.8}]}, None),
        (sample(p=0.9), {"conditions": [{"column": "p", "max": 0.8}]}, ("condition_p", "0.9 > 0.8")),
        (sample(width=10), {"conditions": [{"column": "width", "min": 11}]}, ("condition_width", "10 < 11")),
        (sample(kind=3), {"conditions": [{"column": "kind", "one_of": ["a", "3"]}]}, None),
        (sample(kind="b"), {"conditions": [{"column": "kind", "one_of": ["a", 3]}]}, ("condition_kind", "'b'")),
    ],
)
def test_each_filter(one, asked, expected):
    assert refusal(one, **asked) == expected


@pytest.mark.parametrize("caption", ["A Stock  photo of a dog", "dog (STOCK PHOTO)", "stock\nphoto"])
def test_keywords_are_whole_words_in_either_case(caption):
    assert refusal(sample(caption), keywords=["stock photo"])[0] == "keyword"
    assert refusal(sample("a dog", caption), keywords=["cat", "stock photo"])[0] == "keyword"


@pytest.mark.parametrize("caption", ["livestock photo", "stock photos", "photo stock", "stock-photo"])
def test_keywords_within_words_do_not_count(caption):
    assert refusal(sample(caption), keywords=["stock photo"]) is None


def test_keywords_are_not_patterns_and_may_end_in_signs():
    assert refusal(sample("abc"), keywords=["a.c"]) is None
    assert refusal(sample("made with c++ here"), keywords=["c++"])[0] == "keyword"


def test_keywords_in_the_metadata():
    one = sample(title="Watermark!", site="x")
    assert refusal(one, keywords=["watermark"]) is None
    assert refusal(one, keywords=["watermark"], keyword_columns=["site", "title", "absent"]) == (
        "keyword",
        "'Watermark' in title: 'Watermark!'",
    )


COLUMN_FILTERS = [
    ({"min_aesthetic": 4.5}, "aesthetic"),
    ({"languages": ["en"]}, "language"),
    ({"licences": ["CC0"]}, "license"),
    ({"conditions": [{"column": "sharpness", "min": 3}]}, "sharpness"),
]


@pytest.mark.parametrize(("asked", "column"), COLUMN_FILTERS)
@pytest.mark.parametrize("absent", [{}, {"aesthetic": None, "language": None, "license": None, "sharpness": None}])
def test_a_missing_value_is_a_reason_of_its_own_or_is_kept(asked, column, absent):
    assert refusal(sample(**absent), **asked) == (f"missing_{column}", f"no {column}")
    assert refusal(sample(**absent), **asked, missing="keep") is None


def test_names_are_different_and_missing_columns_are_looked_at_once():
    conditions = [{"column": "p", "min": 1}, {"column": "p", "max": 2}, {"column": "q", "min": 1}]
    predicates = [{"path": "tests.unit.preparation.test_filters.TallImages", "arguments": {"most": 2}}] * 2
    names = [one.name for one in filters(conditions=conditions, predicates=predicates)]
    assert names == [
        "missing_p", "condition_p", "condition_p_2", "missing_q", "condition_q", "TallImages", "TallImages_2"
    ]  # fmt: skip


def test_a_predicate_of_the_users_own():
    asked = {"predicates": [{"path": "tests.unit.preparation.test_filters.TallImages", "arguments": {"most": 2}}]}
    assert refusal(sample(width=100, height=200), **asked) is None
    assert refusal(sample(width=100, height=201), **asked) == ("TallImages", "too tall")


def test_long_values_are_cut():
    name, detail = refusal(sample(language="x" * 500), languages=["en"])
    assert name == "language"
    assert len(detail) < 80


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"min_shorter_side": 0}, "filters.min_shorter_side is 0"),
        ({"max_aspect_ratio": 0.5}, "filters.max_aspect_ratio is 0.5"),
        ({"max_aspect_ratio": float("nan")}, "filters.max_aspect_ratio is nan"),
        ({"min_caption_words": 5, "max_caption_words": 2}, "no image passes both"),
        ({"min_aesthetic": float("inf")}, "filters.min_aesthetic is inf"),
        ({"languages": []}, "filters.languages is an empty list"),
        ({"licences": []}, "filters.licences is an empty list"),
        ({"keywords": ["a", " "]}, "filters.keywords holds an empty text"),
        ({"keyword_columns": ["title"]}, "filters.keywords are not"),
        ({"conditions": [{"min": 3}]}, "filters.conditions.0.column is missing"),
        ({"conditions": [{"column": "a"}]}, "filters.conditions.0 on 'a'"),
        ({"conditions": [{"column": "a", "min": 1, "one_of": [1]}]}, "give one_of, or min and max"),
        ({"conditions": [{"column": "a", "min": 3, "max": 1}]}, "filters.conditions.0.min is 3"),
        ({"predicates": [{"path": "tests.absent.Thing"}]}, "filters.predicates.0.path=tests.absent.Thing"),
        ({"predicates": [{"path": "tests.unit.preparation.test_filters.not_callable"}]}, "cannot be called"),
    ],
)
def test_mistakes_are_told_before_any_work(asked, message):
    with pytest.raises(ConfigurationError, match=message):
        filters(**asked)


def test_a_predicate_that_returns_something_else_is_told():
    asked = {"predicates": [{"path": "tests.unit.preparation.test_filters.returns_a_number"}]}
    with pytest.raises(ConfigurationError, match="returned 3 for 's/1'"):
        refusal(sample(), **asked)
