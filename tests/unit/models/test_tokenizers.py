import numpy as np
import pytest

from diffusion.config.model import Architecture
from diffusion.models.tokenizers import build_tokenizer, clip_merges, num_full, tokenize


@pytest.fixture(scope="module")
def clip():
    return build_tokenizer(Architecture.stable_diffusion_2)


@pytest.fixture(scope="module")
def tiny():
    return build_tokenizer(Architecture.tiny)


def test_clip_has_49408_entries_and_pads_with_id_0(clip):
    assert len(clip) == 49_408
    assert (clip.pad_token, clip.pad_token_id) == ("!", 0)
    assert (clip.bos_token_id, clip.eos_token_id, clip.model_max_length) == (49_406, 49_407, 77)
    assert len(clip_merges()) == 48_894


@pytest.mark.parametrize(
    ("caption", "ids"),
    [
        ("a photo of an astronaut riding a horse on mars", [320, 1125, 539, 550, 18376, 6765, 320, 4558, 525, 7496]),
        ("A Photo  of a CAT", [320, 1125, 539, 320, 2368]),
        ("", []),
    ],
)
def test_clip_gives_the_known_ids(clip, caption, ids):
    expected = [49_406, *ids, 49_407] + [0] * (75 - len(ids))
    assert tokenize(clip, [caption])[0].tolist() == expected


def test_long_captions_are_cut_and_keep_their_end(clip):
    ids = tokenize(clip, ["horse " * 200])
    assert ids.shape == (1, 77)
    assert ids.dtype == np.int32
    assert ids[0, -1] == 49_407


def test_names_of_special_tokens_are_words(clip):
    for caption in ("a photo <|endoftext|> of <|STARTOFTEXT|>!", "a photo of <|EndOfText|>"):
        ids = tokenize(clip, [caption])[0].tolist()
        assert (ids.count(49_406), ids.count(49_407)) == (1, 1)
    for escaped in ("&lt;|endoftext|&gt;", "&lt;|startoftext|&gt;"):
        assert tokenize(clip, [escaped])[0].tolist().index(49_407) > 3


def test_captions_that_take_all_tokens_are_counted(clip):
    captions = ["", "horse " * 74, "horse " * 75, "horse " * 200]
    assert num_full(tokenize(clip, captions), tokenize(clip, [""])[0]) == 2


def test_tiny_reads_any_text(tiny):
    assert len(tiny) == 2048
    captions = ["a red circle on a black background", "Ünïcödé ☺ 漢字 \x00", ""]
    ids = tokenize(tiny, captions)
    assert ids.shape == (3, 24)
    assert (ids >= 0).all()
    assert (ids < 2048).all()
    assert tiny.tokenize(captions[0]) == [word + "</w>" for word in captions[0].split()]
    assert tiny.unk_token_id not in ids[1, 1:5]


def test_captions_are_repaired_as_clip_does(clip):
    repaired, plain = tokenize(clip, ["“Tom &amp; Jerry\u2019s” cafÃ©", '"tom & jerry\'s" café'])
    assert repaired.tolist() == plain.tolist()
    # As transformers 4 encodes it with ftfy, and as data sets hold it.
    ids = [1929, 568, 874, 257, 2583, 257, 959, 138, 123, 138, 112, 139, 227, 139, 225, 139, 225, 138, 113, 139, 227]
    ids += [139, 480, 261, 1097, 35689, 563, 163, 234, 360, 0, 49_407]
    assert tokenize(clip, ["Dog\u2019s ﬁrst “SNOW” … ΟΔΥΣΣΕΥΣ &amp; naïve 猫!"])[0, 1:33].tolist() == ids
