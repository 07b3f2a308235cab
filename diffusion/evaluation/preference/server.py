"""The web server of a study: two images for one prompt, and which of them is better.

A link may carry `?token=` and `?rater=` (`personal_name`); both move into the session, a signed cookie.
"""

import hmac
import secrets
import socket
from datetime import timedelta
from typing import Any

from flask import Flask, Response, abort, redirect, render_template, request, session
from flask.typing import ResponseReturnValue
from itsdangerous import BadSignature, Signer
from waitress.server import create_server

from diffusion.errors import MachineError
from diffusion.evaluation.preference.images import ImageSet, check_image, served_image
from diffusion.evaluation.preference.store import ANSWERS, QUESTIONS, Presentation, Store, generator

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

app = Flask(__name__, template_folder="web", static_folder="web", static_url_path="/web")
app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True


def open_server(store: Store, images: ImageSet, *, token: str | None, host: str, port: int) -> tuple[Any, int]:
    """Open the port; `run()` of the server answers requests.

    Args:
        store: the study.
        images: its images.
        token: required of every visitor; None: only requests to loopback names are answered.
        host: address to listen on.
        port: 0: a free one.

    Returns:
        The server, and its port.

    Raises:
        MachineError: the port is not available.
    """
    app.config.update(
        STORE=store,
        IMAGES=images,
        TOKEN=token,
        TRUSTED_HOSTS=["127.0.0.1", "localhost", "[::1]"] if token is None else None,
        MAX_CONTENT_LENGTH=16_384,
        SECRET_KEY=store.secret,
        SESSION_COOKIE_NAME=f"study-{store.study_id}",  # Cookies are shared by all ports of a host.
        SESSION_COOKIE_SAMESITE="Lax",
        PERMANENT_SESSION_LIFETIME=timedelta(days=365),
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise MachineError(f"--host {host} --port {port}: not available: {error}") from error
    return create_server(app, sockets=[listener], threads=8, ident=None), listener.getsockname()[1]


def personal_name(store: Store, rater: str) -> str:
    """Name of a rater with a signature of this study, for a link."""
    return Signer(store.secret).sign(rater).decode()


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
    """Reject visitors without the token; move token and rater of a link into the session."""
    token = app.config["TOKEN"]
    if token is not None and request.endpoint != "static":
        given = request.args.get("token", session.get("token", ""))
        if not hmac.compare_digest(given.encode(), token.encode()):
            return render_template("closed.html"), 403
        session["token"] = token
    session.permanent = True
    if "rater" in request.args:
        try:
            session["rater"] = Signer(_store().secret).unsign(request.args["rater"]).decode()
        except BadSignature:
            abort(403, "this is no personal link of this study")
    return redirect("/", 303) if {"token", "rater"} & request.args.keys() else None


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
    session.setdefault("rater", secrets.token_urlsafe(16))
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
