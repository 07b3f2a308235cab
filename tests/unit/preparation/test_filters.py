import json
from typing import Any

import duckdb
import pytest

from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError
from diffusion.preparation.config import FiltersConfig
from diffusion.preparation.filters import Rule, build_rules

connection = duckdb.connect()


def rules(**values) -> list[Rule]:
    columns = {"width", "height"}
    return build_rules(
        from_dict(FiltersConfig, values, "test"),
        lambda name: name if name in columns else f"json_extract_string(metadata, '/{name}')",
    )


def rejection(sample: dict[str, Any], **values) -> tuple[str, str] | None:
    """Name and detail of the first rule that rejects."""
    for rule in rules(**values):
        [(rejects, detail)] = connection.execute(
            f"SELECT {rule.rejects}, {rule.detail} FROM (SELECT $width AS width, $height AS height, "
            "$captions::VARCHAR[] AS captions, $metadata AS metadata)", sample
        ).fetchall()  # fmt: skip
        if rejects:
            return rule.name, detail
    return None


def sample(*captions: str, width: int = 640, height: int = 480, **metadata) -> dict[str, Any]:
    texts = list(captions or ("a red dog",))
    return {"width": width, "height": height, "captions": texts, "metadata": json.dumps(metadata)}


def test_without_filters_there_are_no_rules():
    assert rules() == []


@pytest.mark.parametrize(
    ("one", "filters", "expected"),
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
        (sample(aesthetic=True), {"min_aesthetic": 0}, ("aesthetic", "aesthetic is 'true', which is not a number")),
        (sample(laion=5), {"min_aesthetic": 4.5, "aesthetic_column": "laion"}, None),
        (sample(language="EN "), {"languages": ["en", "de"]}, None),
        (sample(language="fr"), {"languages": ["en", "de"]}, ("language", "language is 'fr'")),
        (sample(license="cc0"), {"licences": ["CC0"]}, None),
        (sample(license="all rights reserved"), {"licences": ["CC0"]}, ("licence", "licence is 'all rights reserved'")),
        (sample(pwatermark=0.8), {"conditions": [{"column": "pwatermark", "max": 0.8}]}, None),
        (sample(p=0.9), {"conditions": [{"column": "p", "max": 0.8}]}, ("condition_p", "0.9 > 0.8")),
        (sample(width=10), {"conditions": [{"column": "width", "min": 11}]}, ("condition_width", "10 < 11")),
        (sample(kind=3), {"conditions": [{"column": "kind", "one_of": ["a", "3"]}]}, None),
        (sample(kind=3.0), {"conditions": [{"column": "kind", "one_of": [3]}]}, None),
        (sample(kind="b"), {"conditions": [{"column": "kind", "one_of": ["a", 3]}]}, ("condition_kind", "kind is 'b'")),
    ],
)
def test_each_filter(one, filters, expected):
    assert rejection(one, **filters) == expected


@pytest.mark.parametrize("caption", ["A Stock  photo of a dog", "dog (STOCK PHOTO)", "stock\nphoto"])
def test_keywords_are_whole_words_in_either_case(caption):
    assert rejection(sample(caption), keywords=["stock photo"])[0] == "keyword"
    assert rejection(sample("a dog", caption), keywords=["cat", "stock photo"])[0] == "keyword"


@pytest.mark.parametrize("caption", ["une photo d'été", "ÉTÉ", "(Été)", "hiver\x00été"])
def test_words_and_case_are_those_of_unicode(caption):
    assert rejection(sample(caption), keywords=["été"])[0] == "keyword"
    assert rejection(sample("étés", "été_", "9été"), keywords=["été"]) is None


def test_words_are_the_same_in_each_unicode_form():
    composed, decomposed = "été", "e\u0301te\u0301"
    for word, text in ((composed, decomposed), (decomposed, composed)):
        assert rejection(sample(f"un {text}"), keywords=[word])[0] == "keyword"
        assert rejection(sample(title=text), keywords=[word], keyword_columns=["title"])[0] == "keyword"
        assert rejection(sample(license=text), licences=[word]) is None
    assert rejection(sample("q\u0301", "की", "กี"), keywords=["q", "क", "ก"]) is None, "marks belong to their word"


@pytest.mark.parametrize(
    ("word", "caption"),
    [
        ("水印", "一张带水印的照片"),
        ("ウォーター マーク", "大きなウォーター マーク入り"),
        ("AI", "AI生成の画像"),
        ("生成AI", "これは生成AI の画像"),
        ("人々", "街の人々の写真"),
        ("ｻﾝﾌﾟﾙ", "写真ｻﾝﾌﾟﾙ"),
        ("猫", "三毛猫\U000e0100の写真"),
        ("བོད", "འདི་བོད་ཡིན"),
        ("워터마크", "워터마크가 있는 사진"),
        ("ลายน้ำ", "ภาพที่มีลายน้ำอยู่"),
    ],
)
def test_keywords_in_scripts_without_spaces_are_parts_of_the_text(word, caption):
    reason, detail = rejection(sample(caption), keywords=["stock photo", word])
    assert (reason, detail.split(" in ")[0]) == ("keyword", f"'{word}'")
    assert rejection(sample("一张照片 MAIL AIR"), keywords=[word]) is None


def test_white_space_is_that_of_unicode():
    assert rejection(sample("a\u3000b\xa0c\x85d\u2028e"), max_caption_words=4) == ("caption_words", "5 words > 4")
    assert rejection(sample("stock\xa0photo"), keywords=["stock photo"])[0] == "keyword"


def test_keywords_do_not_span_captions():
    assert rejection(sample("a stock", "photo"), keywords=["stock photo"]) is None


@pytest.mark.parametrize("caption", ["livestock photo", "stock photos", "photo stock", "stock-photo"])
def test_keywords_within_words_do_not_count(caption):
    assert rejection(sample(caption), keywords=["stock photo"]) is None


def test_keywords_are_not_patterns_and_may_end_in_signs():
    assert rejection(sample("abc"), keywords=["a.c"]) is None
    assert rejection(sample("made with c++ here"), keywords=["c++"])[0] == "keyword"


def test_keywords_in_the_metadata():
    one = sample(title="Watermark!", site="x")
    assert rejection(one, keywords=["watermark"]) is None
    assert rejection(one, keywords=["watermark"], keyword_columns=["site", "title", "absent"]) == (
        "keyword",
        "'Watermark' in title: 'Watermark!'",
    )


COLUMN_FILTERS = [
    ({"min_aesthetic": 4.5}, "aesthetic"),
    ({"languages": ["en"]}, "language"),
    ({"licences": ["CC0"]}, "license"),
    ({"conditions": [{"column": "sharpness", "min": 3}]}, "sharpness"),
]


@pytest.mark.parametrize(("filters", "column"), COLUMN_FILTERS)
@pytest.mark.parametrize("absent", [{}, {"aesthetic": None, "language": None, "license": None, "sharpness": None}])
def test_a_missing_value_is_a_reason_of_its_own_or_is_kept(filters, column, absent):
    assert rejection(sample(**absent), **filters) == (f"missing_{column}", f"no {column}")
    assert rejection(sample(**absent), **filters, missing="keep") is None


def test_the_keys_that_an_image_has_are_named():
    name, detail = rejection(sample(licence="CC0", url="a"), licences=["CC0"])
    assert (name, detail.partition("; ")[0]) == ("missing_license", "no license")
    assert "licence" in detail and "url" in detail


def test_names_are_different_and_missing_columns_are_looked_at_once():
    conditions = [{"column": "p", "min": 1}, {"column": "p", "max": 2}, {"column": "q", "min": 1}]
    names = [rule.name for rule in rules(conditions=conditions)]
    assert names == ["missing_p", "condition_p", "condition_p_2", "missing_q", "condition_q"]


def test_long_values_are_cut():
    name, detail = rejection(sample(language="x" * 500), languages=["en"])
    assert name == "language"
    assert len(detail) < 80


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"min_shorter_side": 0}, "filters.min_shorter_side is 0"),
        ({"max_aspect_ratio": 0.5}, "filters.max_aspect_ratio is 0.5"),
        ({"max_aspect_ratio": float("nan")}, "filters.max_aspect_ratio is nan"),
        ({"min_caption_words": 5, "max_caption_words": 2}, "filters.min_caption_words"),
        ({"min_aesthetic": float("inf")}, "filters.min_aesthetic is inf"),
        ({"languages": []}, "filters.languages is an empty list"),
        ({"licences": []}, "filters.licences is an empty list"),
        ({"keywords": ["a", " "]}, "filters.keywords holds an empty text"),
        ({"keyword_columns": ["title"]}, "filters.keyword_columns"),
        ({"conditions": [{"min": 3}]}, "filters.conditions.0.column is missing"),
        ({"conditions": [{"column": "a"}]}, "filters.conditions.0 on 'a'"),
        ({"conditions": [{"column": "a", "one_of": []}]}, "filters.conditions.0 on 'a'"),
        ({"conditions": [{"column": "a", "min": 1, "one_of": [1]}]}, "filters.conditions.0 on 'a'"),
        ({"conditions": [{"column": "a", "min": 3, "max": 1}]}, "filters.conditions.0.min is 3"),
    ],
)
def test_mistakes_are_reported_before_any_work(filters, message):
    with pytest.raises(ConfigurationError, match=message):
        rules(**filters)
