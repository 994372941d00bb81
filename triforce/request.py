"""For `triforce plan` and `triforce check`: see cli/request.py."""

from .cli.request import *  # noqa: F403
