"""The web server of a study: two images for one prompt, and which of them is better.

A personal link carries `?rater=` (`signed_name`): the name of a rater and its signature. The name moves into the
session, a signed cookie. So a link is one rater, in whichever browser it is opened.
"""

import hashlib
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, abort, redirect, render_template, request, session
from flask.typing import ResponseReturnValue
from itsdangerous import BadSignature, Signer
from waitress.server import create_server
from werkzeug.exceptions import SecurityError

from apps.preference.images import ImageSet, check_image, served_image
from apps.preference.store import ANSWERS, QUESTIONS, Presentation, Store, generator
from diffusion.errors import MachineError
from diffusion.launch import LOOPBACK

REQUESTS_PER_SECOND, BURST = 10.0, 1000
"""Requests of a rater, or of an address without one, in the long run and at once. A screen takes four to seven."""

MAX_BODY = 16_384
"""Largest body of a request, in bytes. A vote has about 100."""

CHANNEL_TIMEOUT, CONNECTION_LIMIT = 30, 500
"""Seconds until an idle connection is closed, and number of connections."""

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

app = Flask(__name__, template_folder="web", static_folder="web", static_url_path="/web")
app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True


class RateLimit:
    """Token buckets in memory: each key has `burst` requests, which come back at a rate `per_second`."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self.burst, self._clock = per_second, burst, clock
        self._lock = threading.Lock()
        self._full_at: dict[str, float] = {}
        """Time at which the bucket of a key is full again; those of other keys are full."""

    def take(self, key: str) -> float:
        """Take a request; return 0, or the seconds until the next one is allowed if there is none."""
        now = self._clock()
        with self._lock:
            full_at = max(self._full_at.get(key, now), now) + 1 / self.per_second
            if (excess := full_at - now - self.burst / self.per_second) > 1e-9:
                return excess
            if key not in self._full_at:  # Memory is that of the keys of the last seconds.
                self._full_at = {one: end for one, end in self._full_at.items() if end > now}
            self._full_at[key] = full_at
            return 0.0


def open_server(
    store: Store,
    images: ImageSet,
    *,
    secret: str,
    raters: Collection[str],
    host: str,
    port: int,
    public_url: str | None = None,
) -> tuple[Any, int]:
    """Open the port; `run()` of the server answers requests.

    Args:
        store: the study.
        images: its images.
        secret: signs links and cookies.
        raters: names whose links are answered; none: anybody becomes a rater.
        host: address to listen on. On a loopback address only requests to loopback names, or to that of `public_url`,
            are answered.
        port: 0: a free one.
        public_url: address under which a proxy on this machine serves the page. Its headers for the visitor's address
            and scheme are trusted; with https, cookies are sent through TLS only.

    Returns:
        The server, and its port.

    Raises:
        MachineError: the port is not available.
    """
    url = urlsplit(public_url or "")
    trusted = ["127.0.0.1", "localhost", "[::1]"] if host in LOOPBACK else None
    app.config.update(
        STORE=store,
        IMAGES=images,
        RATERS=frozenset(raters),
        LIMIT=RateLimit(REQUESTS_PER_SECOND, BURST),
        TRUSTED_HOSTS=[url.hostname] if url.hostname else trusted,
        MAX_CONTENT_LENGTH=MAX_BODY,
        SECRET_KEY=secret,
        SESSION_COOKIE_NAME=f"study-{store.study_id}",  # Cookies are shared by all ports of a host.
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=url.scheme == "https",
        PERMANENT_SESSION_LIFETIME=timedelta(days=365),
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise MachineError(f"--host {host} --port {port}: not available: {error}") from error
    proxy = {
        "trusted_proxy": "127.0.0.1",
        "trusted_proxy_headers": {"x-forwarded-for", "x-forwarded-proto"},
        "clear_untrusted_proxy_headers": True,
    }
    server = create_server(
        app,
        sockets=[listener],
        threads=8,
        ident=None,
        max_request_body_size=MAX_BODY,
        channel_timeout=CHANNEL_TIMEOUT,
        cleanup_interval=5,
        connection_limit=CONNECTION_LIMIT,
        asyncore_use_poll=True,  # select() fails at descriptors from 1,024.
        **(proxy if public_url else {}),
    )
    return server, listener.getsockname()[1]


def signed_name(secret: str, rater: str) -> str:
    """Name of a rater with its signature, for a link."""
    return _signer(secret).sign(rater).decode()


def _signer(secret: str) -> Signer:
    return Signer(secret, salt="rater", key_derivation="hmac", digest_method=hashlib.sha256)


def _store() -> Store:
    return app.config["STORE"]


def _presentation(identifier: str) -> Presentation:
    """Presentation of this rater; 404 if it was not shown to this rater."""
    try:
        return _store().presentation(session["rater"], identifier)
    except KeyError:
        abort(404, "this was not shown to you")


@app.before_request
def admit() -> ResponseReturnValue | None:
    """Limit the rate of requests, reject visitors without a link, and move the rater of a link into the session."""
    if isinstance(request.routing_exception, SecurityError):
        raise request.routing_exception  # Another host name: Flask would raise it after this function.
    rater = session.get("rater")
    seconds = app.config["LIMIT"].take(f"address {request.remote_addr}" if rater is None else f"rater {rater}")
    if seconds:
        return "too many requests: wait a little", 429, {"Retry-After": str(math.ceil(seconds))}
    if "rater" in request.args:
        try:
            name = _signer(app.config["SECRET_KEY"]).unsign(request.args["rater"]).decode()
        except BadSignature:
            return render_template("closed.html"), 403
        _sign_in(name)
        return redirect("/", 303)
    raters = app.config["RATERS"]
    if raters and rater not in raters and request.endpoint != "static":
        return render_template("closed.html"), 403
    return None


def _sign_in(rater: str) -> None:
    """Remember a rater in this browser."""
    session["rater"], session.permanent = rater, True


@app.after_request
def secure(response: Response) -> Response:
    """Set the headers of all pages."""
    response.headers.update(_SECURITY)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


@app.get("/")
def start() -> str:
    """Instructions."""
    done = _store().num_votes(session["rater"]) if "rater" in session else 0
    return render_template("start.html", total=_store().num_presentations, done=done)


@app.post("/begin")
def begin() -> ResponseReturnValue:
    """Make a new visitor a rater."""
    if "rater" not in session:
        _sign_in(secrets.token_urlsafe(16))
    return redirect("/rate", 303)


@app.get("/rate")
def rate() -> ResponseReturnValue:
    """The pair that the rater is to answer."""
    if "rater" not in session:
        return redirect("/", 303)
    total = _store().num_presentations
    presentation = _store().next_presentation(session["rater"])
    if presentation is None:
        return render_template("done.html", total=total)
    done = _store().num_votes(session["rater"])
    return render_template("rate.html", id=presentation.id, prompt=presentation.prompt, done=done, total=total)


@app.post("/vote")
def vote() -> ResponseReturnValue:
    """Store the answers: for the page's script, or (without JavaScript) for the form."""
    answers = {question: request.form.get(question, "") for question in QUESTIONS}
    if not set(answers.values()) <= set(ANSWERS):
        abort(400, "an answer to both questions is needed")
    presentation = _presentation(request.form.get("presentation", ""))
    _store().vote(session["rater"], presentation.id, **answers)
    return {"saved": True} if request.accept_mimetypes.best == "application/json" else redirect("/rate", 303)


@app.get('/images/<identifier>/<any("1", "2"):side>')
def image(identifier: str, side: str) -> ResponseReturnValue:
    """First or second image of a presentation."""
    presentation = _presentation(identifier)
    shown, beside = presentation.first, presentation.second
    if side == "2":
        shown, beside = beside, shown
    files = app.config["IMAGES"].items[presentation.item].images
    if shown >= 0:
        content = served_image(files[shown])
    else:
        content = check_image(shown, files[beside], generator(0, identifier).getrandbits(32))
    return content, {"Content-Type": "image/png", "Cache-Control": "private, max-age=3600"}
