"""The web server of a study: two images for one prompt, and which of them is better."""

import functools
import hmac
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, Response, abort, jsonify, make_response, redirect, render_template, request
from waitress.server import create_server
from werkzeug.wrappers import Response as AnyResponse

from diffusion.errors import MachineError
from diffusion.evaluation.preference.images import ImageSet, check_image, served_image
from diffusion.evaluation.preference.store import (
    ANSWERS,
    QUESTIONS,
    Presentation,
    Store,
    StudyFullError,
    UnknownPresentationError,
    generator,
)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]
"""Values of the Host header of requests to these addresses."""

RATER = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_YEAR_SECONDS = 365 * 24 * 3600
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass
class Site:
    """The study, and who may take part."""

    store: Store
    images: ImageSet
    token: str | None
    """Required of every visitor; None: no token."""

    hosts: list[str] | None = None
    """Allowed values of the Host header; None: any."""

    max_raters: int | None = None
    """Largest number of raters; None: any."""

    _encode: Callable[[int, int], bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._encode = functools.lru_cache(maxsize=64)(self._encoded)

    def cookie(self, what: str) -> str:
        """Name of a cookie of this study; cookies are shared by all ports of a host."""
        return f"{what}-{self.store.study_id}"

    def signed(self, rater: str) -> str:
        """A rater's name with the signature of this study."""
        key = hmac.new(self.store.secret.encode(), rater.encode(), "sha256").hexdigest()[:32]
        return f"{rater}:{key}"

    def rater(self, signed: str) -> str | None:
        """The rater of a signed name; None if the signature is wrong."""
        rater = signed.rpartition(":")[0]
        is_ours = hmac.compare_digest(signed.encode(), self.signed(rater).encode())
        return rater if is_ours and RATER.fullmatch(rater) else None

    def image(self, presentation: Presentation, side: int) -> bytes:
        """PNG of a presentation's first (1) or second (2) image."""
        model, other = presentation.first, presentation.second
        if side == 2:
            model, other = other, model
        if model >= 0:
            return self._encode(presentation.item, model)
        path = self.images.items[presentation.item].images[other]
        return check_image(model, path, generator(0, presentation.id).getrandbits(32))

    def _encoded(self, item: int, model: int) -> bytes:
        return served_image(self.images.items[item].images[model])


def build_app(site: Site) -> Flask:
    """Make the web application.

    `/` has the instructions, `/begin` makes a rater, `/rate` shows a pair, `/vote` stores the answers,
    `/images/PRESENTATION/1` and `/2` are the images. A link may carry `?token=` and `?rater=` (`Site.signed`); both
    move into cookies.
    """
    app = Flask(__name__, template_folder="web", static_folder="web", static_url_path="/web")
    app.config["MAX_CONTENT_LENGTH"] = 16_384
    app.config["TRUSTED_HOSTS"] = site.hosts
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True

    app.before_request(lambda: _admit(site))
    app.after_request(_secured)
    app.add_url_rule("/", view_func=functools.partial(_start, site), endpoint="start")
    app.add_url_rule("/begin", view_func=functools.partial(_begin, site), endpoint="begin", methods=["POST"])
    app.add_url_rule("/rate", view_func=functools.partial(_rate, site), endpoint="rate")
    app.add_url_rule("/vote", view_func=functools.partial(_vote, site), endpoint="vote", methods=["POST"])
    app.add_url_rule("/images/<identifier>/<int:side>", view_func=functools.partial(_image, site), endpoint="image")
    return app


def _admit(site: Site) -> AnyResponse | None:
    """Reject visitors without the token; move token and rater of a link into cookies."""
    given = request.args.get("token") or request.cookies.get(site.cookie("token"), "")
    if site.token is not None and not hmac.compare_digest(given.encode(), site.token.encode()):
        if request.path.startswith("/web/") and request.method == "GET" and request.path.endswith(".css"):
            return None
        return make_response(render_template("closed.html"), 403)
    if request.method != "GET" or not ({"token", "rater"} & set(request.args)):
        return None
    rater = request.args.get("rater")
    if rater is not None and site.rater(rater) is None:
        abort(403, "this is no personal link of this study")
    response = redirect("/", 303)
    if site.token is not None:
        _set_cookie(response, site.cookie("token"), site.token)
    if rater is not None:
        _set_cookie(response, site.cookie("rater"), rater)
    return response


def _set_cookie(response: AnyResponse, name: str, value: str) -> None:
    response.set_cookie(name, value, max_age=_YEAR_SECONDS, httponly=True, samesite="Lax", secure=request.is_secure)


def _secured(response: Response) -> Response:
    response.headers.update(_SECURITY)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def _rater(site: Site) -> str | None:
    return site.rater(request.cookies.get(site.cookie("rater"), ""))


def _start(site: Site) -> str:
    rater = _rater(site)
    done = site.store.num_votes(rater) if rater else 0
    return render_template("start.html", total=site.store.num_presentations, done=done)


def _begin(site: Site) -> AnyResponse:
    response = redirect("/rate", 303)
    if _rater(site) is None:
        _set_cookie(response, site.cookie("rater"), site.signed(secrets.token_urlsafe(16)))
    return response


def _rate(site: Site) -> AnyResponse | str:
    rater = _rater(site)
    if rater is None:
        return redirect("/", 303)
    try:
        presentation = site.store.next_presentation(rater, max_raters=site.max_raters)
    except StudyFullError:
        abort(403, "this study has its largest number of raters")
    total = site.store.num_presentations
    if presentation is None:
        return render_template("done.html", total=total)
    done = site.store.num_votes(rater)
    return render_template("rate.html", id=presentation.id, prompt=presentation.prompt, done=done, total=total)


def _vote(site: Site) -> AnyResponse:
    rater = _rater(site)
    answers = {question: request.form.get(question, "") for question in QUESTIONS}
    if rater is None or any(answer not in ANSWERS for answer in answers.values()):
        abort(400, "an answer to both questions is needed")
    try:
        is_new = site.store.vote(rater, request.form.get("presentation", ""), **answers)
    except UnknownPresentationError:
        abort(404, "this was not shown to you")
    if request.accept_mimetypes.best == "application/json":
        return jsonify(saved=True, new=is_new)
    return redirect("/rate", 303)


def _image(site: Site, identifier: str, side: int) -> AnyResponse:
    rater = _rater(site)
    if rater is None or side not in (1, 2):
        abort(404)
    try:
        presentation = site.store.presentation(rater, identifier)
    except UnknownPresentationError:
        abort(404)
    response = make_response(site.image(presentation, side))
    response.headers["Content-Type"] = "image/png"
    response.headers["Cache-Control"] = "private, max-age=3600"
    return response


def open_server(site: Site, host: str, port: int) -> tuple[Any, int]:
    """Open the port; `run()` of the server answers requests.

    Args:
        site: the study.
        host: address to listen on.
        port: 0: a free one.

    Returns:
        The server, and its port.

    Raises:
        MachineError: the port is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise MachineError(f"--host {host} --port {port}: not available: {error}") from error
    server = create_server(build_app(site), sockets=[listener], threads=8, ident=None)
    return server, listener.getsockname()[1]
