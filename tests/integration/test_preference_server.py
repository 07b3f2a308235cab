"""The real server: killed, asked by strangers, and used in a browser."""

import csv
import io
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from itsdangerous import TimestampSigner
from PIL import Image

from diffusion.evaluation.preference.store import Store
from tests.tools.devtools import CHROMIUM, Tab
from tests.tools.preference_studies import MODELS, SCRIPT, serving, write_models

pytestmark = pytest.mark.slow

HOSTILE = "<script>document.title='taken'</script>\"'&"


def rate_once(session: requests.Session, address: str, acknowledged: set[str]) -> bool:
    """Answer one presentation by two requests at the same time; False when there is none left."""
    found = re.search(r'name="presentation" value="([^"]+)"', session.get(address + "rate", timeout=300).text)
    if not found:
        return False
    form = {"presentation": found[1], "quality": "first", "alignment": "second"}
    send = lambda: session.post(address + "vote", data=form, headers={"Accept": "application/json"}, timeout=300)  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        for answer in [pool.submit(send), pool.submit(send)]:
            answer.result().raise_for_status()
            acknowledged.add(found[1])
    return True


def test_a_killed_server_loses_no_vote_and_counts_none_twice(tmp_path):
    models = write_models(tmp_path, prompts=[f"prompt {i}" for i in range(60)], size=8)
    options = ["--pairs", "43", "--repeats", "4", "--checks", "3"]
    raters = [requests.Session() for _ in range(10)]
    acknowledged: set[str] = set()
    kills = [90, 230, 410, None]
    for kill_at in kills:
        with serving(tmp_path, models, *options) as (address, process):
            for session in raters:
                session.post(address + "begin", timeout=300).raise_for_status()

            def rate(session, address=address, process=process, kill_at=kill_at):
                try:
                    while rate_once(session, address, acknowledged):
                        if kill_at is not None and len(acknowledged) >= kill_at:
                            process.kill()
                except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                    return

            with ThreadPoolExecutor(len(raters)) as pool:
                list(pool.map(rate, raters))
    store = Store(tmp_path / "votes.sqlite")
    stored = [row[0] for row in store._connection.execute("SELECT presentation FROM votes")]
    assert len(stored) == len(set(stored)) == 500
    assert acknowledged <= set(stored)
    assert len(acknowledged) > 450
    votes = store.votes()
    assert len(votes) == len(votes.drop_duplicates(["rater", "position"])) == 500


def test_strangers_are_turned_away_and_models_stay_hidden(tmp_path):
    models = write_models(tmp_path, prompts=[HOSTILE, "another"])
    with serving(tmp_path, models, "--token", "k&y", "--pairs", "2") as (address, _):
        root = address.split("?")[0]
        assert address.endswith("?token=k%26y")
        for path in ("", "rate", "?token=wrong"):
            assert requests.get(root + path, timeout=300).status_code == 403
        session = requests.Session()
        start = session.get(address, timeout=300)
        assert start.status_code == 200
        assert "k&y" not in start.url
        assert session.get(root + "?rater=<b>", timeout=300).status_code == 403
        pages = [session.post(root + "begin", timeout=300)]
        for _ in range(9):
            page = session.get(root + "rate", timeout=300)
            pages.append(page)
            found = re.search(r'value="([^"]+)">\s*<fieldset', page.text)
            if not found:
                break
            for side in (1, 2):
                content = session.get(f"{root}images/{found[1]}/{side}", timeout=300)
                pages.append(content)
                image = Image.open(io.BytesIO(content.content))
                assert image.format == "PNG"
                assert image.info == {}
            stranger = requests.Session()
            stranger.get(address, timeout=300)
            assert stranger.get(f"{root}images/{found[1]}/1", timeout=300).status_code == 404
            form = {"presentation": found[1], "quality": "first", "alignment": "first"}
            assert session.post(root + "vote", data={**form, "quality": "x"}, timeout=300).status_code == 400
            pages.append(session.post(root + "vote", data=form, timeout=300))
        assert "saved. You can close" in pages[-1].text
        assert any("&lt;script&gt;document.title" in page.text for page in pages)
        for page in pages:
            assert b"secretmodel" not in page.content
            assert "secretmodel" not in str(page.headers) + page.url
            assert b"<script>" not in page.content


def test_nobody_votes_as_somebody_else(tmp_path):
    models = write_models(tmp_path)
    sites = {}
    with serving(tmp_path, models, "--raters", "anna", "bert", links=sites) as (address, _):
        anna, anna_again = requests.Session(), requests.Session()
        for session in (anna, anna_again):
            assert session.get(sites["anna"], timeout=300).status_code == 200
            assert "presentation" in session.get(address + "rate", timeout=300).text
        shown = re.search(r'name="presentation" value="([^"]+)"', anna.get(address + "rate", timeout=300).text)
        assert shown
        form = {"presentation": shown[1], "quality": "first", "alignment": "first"}
        study = Store(tmp_path / "votes.sqlite").study_id
        for name in ("anna", "anna.", "anna." + sites["bert"].rpartition(".")[2]):
            assert requests.get(f"{address}?rater={name}", timeout=300).status_code == 403
        of_anna = anna.cookies[f"study-{study}"]
        signature = TimestampSigner("another secret", salt="cookie-session", key_derivation="hmac")
        for cookie in ("anna", signature.sign(of_anna.rsplit(".", 2)[0]).decode()):
            forged = {"Cookie": f"study-{study}={cookie}"}
            assert requests.post(address + "vote", data=form, headers=forged, timeout=300).status_code == 404
        assert anna.post(address + "vote", data=form, timeout=300).status_code == 200
    votes = Store(tmp_path / "votes.sqlite").votes()
    assert list(votes["rater"]) == ["anna"]


def test_on_loopback_other_host_names_are_refused(tmp_path):
    models = write_models(tmp_path)
    with serving(tmp_path, models) as (address, _):
        assert requests.get(address, timeout=300).status_code == 200
        assert requests.get(address, headers={"Host": "elsewhere.example"}, timeout=300).status_code == 400


def command(*arguments: object) -> subprocess.CompletedProcess:
    words = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
def test_fifty_pairs_by_clicks_and_keys_in_a_browser(tmp_path):
    prompts = [HOSTILE, *(f"prompt {i}" for i in range(49))]
    models = write_models(tmp_path, prompts=prompts)
    options = ["--pairs", "50", "--repeats", "0", "--checks", "0"]
    expected = []
    draw = random.Random(5)
    with serving(tmp_path, models, *options) as (address, _), Tab(390, 844) as tab:
        tab.open(address, "document.querySelector('button.next')")
        tab.click("button.next")
        for i in range(50):
            tab.wait(f"document.body.dataset.ready == 'true' && document.querySelector('progress').value == {i}")
            assert tab.value("document.title") == "Which image?"
            answers = draw.choices(["first", "neither", "second"], k=2)
            expected.append(tuple(answers))
            if i % 2:
                for answer in answers:
                    tab.key({"first": "1", "neither": "0", "second": "2"}[answer])
                tab.key("Enter")
            else:
                tab.key("2")
                tab.key("Backspace")
                for question, answer in zip(("quality", "alignment"), answers, strict=True):
                    tab.click(f"label:has(input[name={question}][value={answer}])")
                tab.click("button.next", times=2)
        tab.wait("document.querySelector('#finished')")
    store = Store(tmp_path / "votes.sqlite")
    assert list(zip(*(store.votes()[question] for question in ("quality", "alignment")), strict=True)) == expected
    store.close()

    done = command("export", tmp_path / "votes.sqlite", "--out", tmp_path / "votes.csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "votes.csv").open(newline="")))
    assert {row["quality"] for row in rows} == {*MODELS[:2], ""}
    done = command("report", tmp_path / "votes.sqlite", "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b50 votes of 1\b", done.stdout)
    assert (tmp_path / "report" / "preference.png").stat().st_size > 5000
