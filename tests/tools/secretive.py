"""A callback that the tests of a run's report name by import path."""

from composer import Callback

API_KEY = "planted-1-config"


class Secretive(Callback):
    """Takes arguments that are nobody else's business."""

    def __init__(self, api_key: str, url: str, note: str) -> None:
        assert api_key == API_KEY, "the callback gets what the configuration says"
