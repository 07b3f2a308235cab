"""The real server: killed, asked by strangers, and used in a browser."""

import csv
import hashlib
import io
import os
import random
import re
import runpy
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import requests
from itsdangerous import Signer, TimestampSigner
from PIL import Image

from apps.preference.images import collect
from apps.preference.server import BURST, RateLimit, open_server
from apps.preference.store import Settings, Store
from diffusion.errors import ConfigurationError, MachineError
from tests.tools.devtools import CHROMIUM, Tab
from tests.tools.forking import free_port
from tests.tools.preference_studies import MODELS, SCRIPT, serving, write_models

pytestmark = pytest.mark.slow

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

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


def test_a_killed_server_loses_no_vote_and_counts_none_twice(server, tmp_path):
    models = write_models(tmp_path, prompts=[f"prompt {i}" for i in range(60)], size=8)
    options = ["--pairs", "43", "--repeats", "4", "--checks", "3"]
    raters = [requests.Session() for _ in range(10)]
    acknowledged: set[str] = set()
    kills = [90, 230, 410, None]
    for kill_at in kills:
        with serving(server, tmp_path, models, *options) as (address, job):
            for session in raters:
                session.post(address + "begin", timeout=300).raise_for_status()

            def rate(session, address=address, job=job, kill_at=kill_at):
                try:
                    while rate_once(session, address, acknowledged):
                        if kill_at is not None and len(acknowledged) >= kill_at:
                            with suppress(ProcessLookupError):
                                os.kill(job.pids[0], signal.SIGKILL)
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


def test_a_server_that_is_ended_leaves_all_votes_in_one_file(server, tmp_path):
    models = write_models(tmp_path, size=8)
    with serving(server, tmp_path, models) as (address, job):
        session = requests.Session()
        session.post(address + "begin", timeout=300).raise_for_status()
        assert rate_once(session, address, set())
        os.kill(job.pids[0], signal.SIGTERM)
        assert job.finish().codes == [0]
    shutil.copy(tmp_path / "votes.sqlite", tmp_path / "copy.sqlite")
    assert len(Store(tmp_path / "copy.sqlite").votes()) == 1


def test_strangers_are_turned_away_and_models_stay_hidden(server, tmp_path):
    models = write_models(tmp_path, prompts=[HOSTILE, "another"])
    links: dict[str, str] = {}
    with serving(server, tmp_path, models, "--raters", "anna", "bert", "--pairs", "2", links=links) as (root, _):
        for path in ("", "rate", "?rater=anna", "?rater=<b>"):
            assert requests.get(root + path, timeout=300).status_code == 403
        assert requests.post(root + "begin", timeout=300).status_code == 403, "nobody becomes a rater without a link"
        session = requests.Session()
        start = session.get(links["anna"], timeout=300)
        assert start.status_code == 200
        assert "anna" not in start.url
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
            stranger.get(links["bert"], timeout=300)
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


def test_nobody_votes_as_somebody_else(server, tmp_path):
    models = write_models(tmp_path)
    sites = {}
    with serving(server, tmp_path, models, "--raters", "anna", "bert", links=sites) as (address, _):
        anna, anna_again = requests.Session(), requests.Session()
        found = []
        for session in (anna, anna_again):
            assert session.get(sites["anna"], timeout=300).status_code == 200
            page = session.get(address + "rate", timeout=300).text
            found.append(re.search(r'name="presentation" value="([^"]+)"', page))
        shown = found[0]
        assert shown
        assert found[1] and found[1][1] == shown[1], "a link in a second browser is the same rater"
        form = {"presentation": shown[1], "quality": "first", "alignment": "first"}
        study = Store(tmp_path / "votes.sqlite").study_id
        signature = sites["anna"].rpartition(".")[2]
        altered = ("b" if signature[0] == "a" else "a") + signature[1:]
        another = Signer("another secret", salt="rater", key_derivation="hmac", digest_method=hashlib.sha256)
        of_bert = sites["bert"].rpartition(".")[2]
        forged_links = (another.sign("anna").decode(), f"annb.{signature}", f"anna.{altered}", f"anna.{of_bert}")
        for name in ("anna", "anna.", *forged_links):
            assert requests.get(f"{address}?rater={name}", timeout=300).status_code == 403
        of_anna = anna.cookies[f"study-{study}"]
        of_cookie = TimestampSigner("another secret", salt="cookie-session", key_derivation="hmac")
        for cookie in ("anna", of_cookie.sign(of_anna.rsplit(".", 2)[0]).decode()):
            forged = {"Cookie": f"study-{study}={cookie}"}
            assert requests.post(address + "vote", data=form, headers=forged, timeout=300).status_code == 403
        assert anna.post(address + "vote", data=form, timeout=300).status_code == 200
        assert anna_again.post(address + "vote", data=form, timeout=300).status_code == 200
    with serving(server, tmp_path, models, "--raters", "bert") as (address, _):
        for name, code in (("anna", 403), ("bert", 200)):  # Anna's name is no longer given.
            session = requests.Session()
            query = sites[name].partition("?")[2]
            assert session.get(f"{address}?{query}", timeout=300).status_code == code
    store = Store(tmp_path / "votes.sqlite")
    assert list(store.votes()["rater"]) == ["anna"]
    secret = tmp_path / "votes.sqlite.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_bytes() not in (tmp_path / "votes.sqlite").read_bytes(), "the votes may be passed on"
    assert store.read_secret() == secret.read_text(), "links outlive the server"
    secret.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod"):
        store.read_secret()


def test_too_many_requests_of_a_rater_are_refused_and_others_are_answered(server, tmp_path):
    models = write_models(tmp_path, size=8)
    links: dict[str, str] = {}
    with serving(server, tmp_path, models, "--raters", "anna", "bert", links=links) as (address, _):
        anna, bert = requests.Session(), requests.Session()
        for session, name in ((anna, "anna"), (bert, "bert")):
            assert session.get(links[name], timeout=300).status_code == 200
        answers = [anna.get(address + "web/icon.svg", timeout=300)]
        while answers[-1].status_code == 200 and len(answers) < 10 * BURST:
            answers.append(anna.get(address + "web/icon.svg", timeout=300))
        assert answers[-1].status_code == 429
        assert len(answers) >= BURST - 5
        assert int(answers[-1].headers["Retry-After"]) >= 1
        assert bert.get(address + "rate", timeout=300).status_code == 200
        codes = [403]
        while codes[-1] == 403 and len(codes) < 10 * BURST:
            codes.append(requests.get(f"{address}?rater=forged", timeout=300).status_code)
        assert codes[-1] == 429
        assert bert.get(address + "rate", timeout=300).status_code == 200
        time.sleep(1)
        assert anna.get(address + "rate", timeout=300).status_code == 200


def test_large_bodies_and_idle_connections_of_strangers_leave_room_for_raters(tmp_path):
    write_models(tmp_path, size=8)
    images = collect({name: tmp_path / name for name in MODELS[:2]}, tmp_path / "prompts.txt")
    settings = Settings(seed=1, num_pairs=1, num_repeats=0, num_checks=0)
    store = Store.create_or_continue(tmp_path / "votes.sqlite", images, settings)
    server, port = open_server(store, images, secret="s" * 32, raters=["anna"], host="127.0.0.1", port=0)
    threading.Thread(target=server.run, daemon=True).start()
    with ExitStack() as opened:
        idle = []
        for _ in range(150):
            idle.append(opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)))
            idle[-1].sendall(b"POST /vote HTTP/1.1\r\n")
        assert requests.get(f"http://127.0.0.1:{port}/", timeout=20).status_code == 403
        idle[0].sendall(b"Host: 127.0.0.1\r\nContent-Length: 300000000\r\n\r\n")
        assert b" 413 " in idle[0].recv(100), "an answer before the body"
        server.maintenance(time.time() + 60)
        assert idle[1].recv(100) == b"", "closed"


def test_requests_come_back_at_a_rate():
    now = [0.0]
    limit = RateLimit(2.0, 4, clock=lambda: now[0])
    assert [limit.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert limit.take("b") == 0
    now[0] = 0.5
    assert [limit.take("a"), limit.take("a")] == [0, 0.5]
    now[0] = 100.0
    assert [limit.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_behind_a_proxy_its_word_is_taken_and_the_cookie_goes_through_tls_only(server, tmp_path):
    models = write_models(tmp_path, size=8)
    links: dict[str, str] = {}
    options = ["--raters", "anna", "--public-url", "https://study.example.org"]
    with serving(server, tmp_path, models, *options, links=links) as (address, _):
        path = links["anna"].removeprefix("https://study.example.org/")
        through = {"Host": "study.example.org", "X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}
        answer = requests.get(address + path, headers=through, timeout=300, allow_redirects=False)
        assert answer.status_code == 303
        flags = {part.strip() for part in answer.headers["Set-Cookie"].split(";")}
        assert flags >= {"Secure", "HttpOnly", "SameSite=Lax"}
        assert requests.get(address + path, timeout=300, allow_redirects=False).status_code == 400, "another host name"
        codes = []
        while len(codes) < 10 * BURST and 429 not in codes:
            codes.append(requests.get(address, headers=through, timeout=300).status_code)
        assert codes[-1] == 429
        elsewhere = through | {"X-Forwarded-For": "192.0.2.2"}
        assert requests.get(address, headers=elsewhere, timeout=300).status_code == 403, "another visitor's limit"
    with serving(server, tmp_path, models, "--raters", "anna", links=links) as (address, _):
        answer = requests.get(links["anna"], headers={"X-Forwarded-Proto": "https"}, timeout=300, allow_redirects=False)
        assert "Secure" not in answer.headers["Set-Cookie"]
        assert requests.get(address, headers={"Host": "elsewhere.example"}, timeout=300).status_code == 400


def test_a_page_that_others_can_reach_needs_personal_links(tmp_path, monkeypatch):
    models = write_models(tmp_path, size=8)
    start = ["serve", *models, "--prompts", str(tmp_path / "prompts.txt"), "--votes", str(tmp_path / "votes.sqlite")]
    main = runpy.run_path(str(SCRIPT))["main"]
    for options in (["--host", "0.0.0.0"], ["--public-url", "https://a"], ["--raters", "a", "--public-url", "a/b"]):
        monkeypatch.setattr(sys, "argv", ["preference.py", *start, *options])
        with pytest.raises(ConfigurationError):
            main()
    assert not (tmp_path / "votes.sqlite").exists()


def test_outputs_that_cannot_be_written_and_addresses_that_are_none_are_mistakes(tmp_path, monkeypatch):
    models, votes = write_models(tmp_path, size=8), tmp_path / "votes.sqlite"
    start = ["serve", *models, "--prompts", tmp_path / "prompts.txt", "--raters", "a", "--votes"]
    images = collect({name: tmp_path / name for name in MODELS[:2]}, tmp_path / "prompts.txt")
    Store.create_or_continue(votes, images, Settings(seed=1, num_pairs=1, num_repeats=0, num_checks=0)).close()
    main = runpy.run_path(str(SCRIPT))["main"]
    for kind, message, options in (
        (ConfigurationError, "--public-url", [*start, tmp_path / "new.sqlite", "--public-url", "http://[x"]),
        (MachineError, "cannot be written", [*start, votes / "new.sqlite"]),
        (MachineError, "--out", ["report", votes, "--out", votes]),
    ):
        monkeypatch.setattr(sys, "argv", ["preference.py", *map(str, options)])
        with pytest.raises(kind, match=message):
            main()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
@pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx")
def test_the_proxy_of_the_guide_serves_the_page_by_tls(server, tmp_path):
    guide = (SCRIPT.parents[1] / "docs/preference.md").read_text(encoding="utf-8")
    block = guide.partition("```nginx\n")[2].partition("```")[0]
    models = write_models(tmp_path, size=8)
    port, tls_port = free_port(), free_port()
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=study.example.org"]
    make += ["-keyout", str(tmp_path / "privkey.pem"), "-out", str(tmp_path / "fullchain.pem")]
    subprocess.run(make, check=True, capture_output=True)
    block = block.replace("/etc/letsencrypt/live/study.example.org", str(tmp_path))
    block = block.replace("443", str(tls_port)).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    folders = "".join(f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi"))
    http = f"http {{ access_log off; {folders} scgi_temp_path {tmp_path}/scgi; {block} }}"
    configuration = tmp_path / "nginx.conf"
    configuration.write_text(f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/log; events {{}} {http}")
    links: dict[str, str] = {}
    url = f"https://study.example.org:{tls_port}"
    options = ["--port", str(port), "--pairs", "1", "--repeats", "0", "--checks", "0"]
    options += ["--raters", "anna", "--public-url", url]
    flags = ["--ignore-certificate-errors", "--host-resolver-rules=MAP study.example.org 127.0.0.1"]
    proxy = subprocess.Popen([str(NGINX), "-c", str(configuration), "-p", str(tmp_path)])
    try:
        with serving(server, tmp_path, models, *options, links=links), Tab(1280, 800, *flags) as tab:
            assert proxy.poll() is None, (tmp_path / "log").read_text()
            tab.open(links["anna"], "document.querySelector('button.next')")
            (cookie,) = tab.call("Network.getCookies")["cookies"]
            assert cookie["secure"] and cookie["httpOnly"]
            tab.click("button.next")
            tab.wait("document.body.dataset.ready == 'true'")
            for key in ("1", "2", "Enter"):
                tab.key(key)
            tab.wait("document.querySelector('#finished')")
    finally:
        proxy.terminate()
        proxy.wait(300)
    votes = Store(tmp_path / "votes.sqlite").votes()
    assert list(votes["rater"]) == ["anna"]


def command(python: str, *arguments: object) -> subprocess.CompletedProcess:
    words = [python, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
def test_pairs_by_clicks_and_keys_in_a_browser(server, python, tmp_path):
    prompts = [HOSTILE, *(f"prompt {i}" for i in range(23))]
    models = write_models(tmp_path, prompts=prompts)
    options = ["--pairs", "24", "--repeats", "0", "--checks", "0"]
    expected = []
    draw = random.Random(5)
    with serving(server, tmp_path, models, *options) as (address, _), Tab(390, 844) as tab:
        tab.open(address, "document.querySelector('button.next')")
        tab.click("button.next")
        for i in range(24):
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

    done = command(python, "export", tmp_path / "votes.sqlite", "--out", tmp_path / "votes.csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "votes.csv").open(newline="")))
    assert {row["quality"] for row in rows} == {*MODELS[:2], ""}
    done = command(python, "report", tmp_path / "votes.sqlite", "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b24 votes of 1\b", done.stdout)
    assert (tmp_path / "report" / "preference.png").stat().st_size > 5000
