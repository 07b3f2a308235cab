"""Captions of 500 images by a server with faults, killed twice: every image is answered, and none asked for again."""

import hashlib
import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
from PIL import Image

from diffusion.preparation.chat_captions import data_url
from tests.tools.chat_server import FAULTS, MODEL, chat_server, faulty
from tests.tools.image_files import write_folder

pytestmark = pytest.mark.slow

NUM, WORKERS, CONCURRENCY = 500, 1, 16


def test_no_image_is_lost_or_asked_for_twice(server, tmp_path):
    write_folder(tmp_path / "images", NUM, side=40)
    out, met = tmp_path / "out", Counter[str]()
    plain = hashlib.sha1(data_url(Image.new("RGB", (64, 64), "grey"), 768).encode()).hexdigest()

    def behave(image: str, number: int) -> str:
        if image == plain:
            return ""
        met[behaviour := faulty(image, number)] += 1
        return behaviour

    with chat_server(behave) as chats:
        chats.stall = 3.5
        settings = {
            "sources": [str(tmp_path / "images")], "out": str(out), "partition_size": 250, "workers": WORKERS,
            "buckets": {"edges": [32]},
            "captioner": {"mode": "instead", "chat": {"model": MODEL, "server": {
                "url": chats.url, "concurrency": CONCURRENCY, "timeout_seconds": 3, "attempts": 4,
                "dollars_per_million_prompt_tokens": 1.0}}},
        }  # fmt: skip
        (tmp_path / "prepare.yaml").write_text(json.dumps(settings))
        command = ["scripts/prepare.py", "--config", str(tmp_path / "prepare.yaml"), "--quiet"]
        for share in (0.3, 0.6):
            job = server.start(0, command)
            job.wait_for(lambda share=share: len(chats.final) >= share * NUM)
            job.kill()
        job = server.start(0, command).finish()
        assert job.codes == [0], job.output
        twice = sum(len(answers) - 1 for image, answers in chats.final.items() if image != plain)

    parts = [pq.read_table(path) for path in sorted(out.glob("scores/captions/*.parquet"))]
    rows = [row for part in parts for row in part.to_pylist()]
    assert len(rows) == NUM
    outcomes = Counter(row["answers"]["outcome"] for row in rows)
    assert {*outcomes} >= {"captioned", "refused", "failed", "invalid"} and {*met} >= {*FAULTS, "refuse"}
    assert all(len(row["captions"]) == (3 if row["answers"]["outcome"] == "captioned" else 1) for row in rows)
    texts = Counter(row["captions"][0] for row in rows if row["answers"]["outcome"] == "captioned")
    assert max(texts.values()) == 1, "each image has its own captions"
    assert twice <= 2 * WORKERS * CONCURRENCY, "those whose answers were under way"
    report = json.loads((out / "report.json").read_text())["captions"]
    assert {name: count for name, count in report["outcomes"].items() if count} == outcomes
    assert report["dollars_per_1000_images"] == pytest.approx(
        0.3 * sum(row["answers"]["requests"] for row in rows) / NUM
    )
    assert not (out / "answers").exists()
