"""S3 event notifications in a queue of SQS.

A message is JSON as S3 sends it: `Records`, each an event with bucket and key. The queue delivers a message at least
once, and again when it was not deleted within the visibility timeout. Credentials come from where boto3 finds them.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus, urlsplit

from diffusion.errors import ConfigurationError, MachineError
from diffusion.preparation.records import parse_object
from diffusion.storage import shown

_BATCH = 10
"""Messages of a request."""

_LONGEST_WAIT, _LONGEST_VISIBILITY = 20, 43_200
"""Limits of SQS, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message that was received and not deleted yet."""

    id: str
    receipt: str
    """Handle that deletes it, of the last delivery."""
    num_deliveries: int
    body: str
    objects: Mapping[str, int]
    """Bytes of the objects that were created, by URI."""
    problem: str = ""
    """Why the body was not understood."""


def parse_event(body: str) -> dict[str, int]:
    """Return the bytes of the objects that were created, by URI.

    Events of another kind are skipped, and so is the message by which S3 tests a queue.

    Raises:
        ValueError: it is no notification of S3.
    """
    event = parse_object(body)
    if event.get("Event") == "s3:TestEvent":
        return {}
    try:
        created = [one["s3"] for one in event["Records"] if one["eventName"].startswith("ObjectCreated:")]
        return {
            f"s3://{one['bucket']['name']}/{unquote_plus(one['object']['key'])}": int(one["object"].get("size", 0))
            for one in created
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no notification of S3 ({error!r})") from error


class Queue:
    """A queue of SQS, given by its URL, whose host is the endpoint."""

    def __init__(self, url: str) -> None:
        from boto3.session import Session

        self._url, parts = url, urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.path.strip("/"):
            raise ConfigurationError(
                f"--queue {shown(url)} is no queue; give its URL, as https://sqs.REGION.amazonaws.com/ACCOUNT/NAME"
            )
        region = re.match(r"sqs\.([\w-]+)\.amazonaws\.", parts.netloc)
        with self._errors():
            self._client = Session().client(
                "sqs", endpoint_url=f"{parts.scheme}://{parts.netloc}", region_name=region[1] if region else None
            )

    def receive(self, seconds: float, visibility: float) -> list[Message]:
        """Receive up to ten messages: wait `seconds` for the first, at most 20. They stay hidden for `visibility` s."""
        with self._errors():
            answer = self._client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=_BATCH,
                WaitTimeSeconds=min(_LONGEST_WAIT, math.ceil(seconds)),
                VisibilityTimeout=min(_LONGEST_VISIBILITY, math.ceil(visibility)),
                AttributeNames=["ApproximateReceiveCount"],
            )
        return [_message(entry) for entry in answer.get("Messages", ())]

    def delete(self, messages: Iterable[Message]) -> None:
        """Delete messages; one that SQS does not delete is delivered again."""
        entries = [{"Id": str(number), "ReceiptHandle": one.receipt} for number, one in enumerate(messages)]
        for start in range(0, len(entries), _BATCH):
            with self._errors():
                self._client.delete_message_batch(QueueUrl=self._url, Entries=entries[start : start + _BATCH])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            code = error.response["Error"]["Code"] if isinstance(error, ClientError) else type(error).__name__
            raise MachineError(
                f"--queue {shown(self._url)} cannot be used ({code}); check its URL, the region and the credentials "
                "(AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), and run the same command again"
            ) from error


def _message(entry: Mapping[str, Any]) -> Message:
    objects: dict[str, int] = {}
    problem = ""
    try:
        objects = parse_event(entry["Body"])
    except ValueError as error:
        problem = str(error)
    return Message(
        id=entry["MessageId"],
        receipt=entry["ReceiptHandle"],
        num_deliveries=int(entry["Attributes"]["ApproximateReceiveCount"]),
        body=entry["Body"],
        objects=objects,
        problem=problem,
    )
