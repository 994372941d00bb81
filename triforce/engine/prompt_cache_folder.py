"""A folder of prompt-cache files: a prompt finds the one that has its beginning."""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..parallel import read_first, together
from .prompt_cache import SHARED_FROM, Prefix, common_length, layout_of, opened
from .prompt_cache_file import PrefixReader

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("triforce")
NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.safetensors")  # digests of the model and of the tokens


class PromptCacheFolder:
    """See the module. Several processes may share a folder, of whatever models.

    Args:
        most_bytes: of all files. The newest stay; a file that is read is new again.
    """

    def __init__(self, engine: "Engine", path: str | Path, most_bytes: int):
        self.engine, self.path, self.most_bytes = engine, Path(path).expanduser(), most_bytes
        self._tokens: dict[Path, list[int]] = {}  # those with keys and values, of each file that was looked at
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot keep prompts in {self.path}: {error.strerror}; give another cache_dir") from None

    def length(self, tokens: list[int]) -> int:
        """How many tokens of a text a file has, whole flush intervals; 0 where it is not worth reading."""
        return read_first(self.engine.target.group, lambda: self._find(tokens)[0])

    @contextlib.contextmanager
    def reader(self, tokens: list[int]) -> Iterator[PrefixReader | None]:
        """The file that has most of the beginning of a text, open for reading; None where none has enough of it."""
        group = self.engine.target.group
        _, path = read_first(group, lambda: self._find(tokens))
        with contextlib.ExitStack() as stack:
            if path is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)
            yield path and together(group, lambda: stack.enter_context(opened(path, self.engine)))[0]

    def _find(self, tokens: list[int]) -> tuple[int, Path | None]:
        """(tokens, file). At least half of the text, and half of the file, must be the same."""
        found, unit = (0, None), self.engine.settings.flush_interval
        for path in self._files(self._model()):
            if path not in self._tokens:
                self._tokens[path] = []
                with contextlib.suppress(UserError), opened(path, self.engine) as reader:
                    self._tokens[path] = reader.tokens[: reader.layout.length]
            held = self._tokens[path]
            same = common_length(held, tokens) // unit * unit
            if same > found[0] and same >= max(SHARED_FROM, len(tokens) // 2, len(held) // 2):
                found = same, path
        return found

    def save(self, prefix: Prefix) -> None:
        """Writes a document, and removes the oldest files beyond the limit. What the disk refuses is logged."""
        nbytes = layout_of(self.engine, len(prefix), prefix.num_shared).header("")[2]
        digest = hashlib.sha256(json.dumps(prefix.tokens).encode()).hexdigest()[:32]
        try:
            if nbytes > self.most_bytes:
                raise UserError(f"it takes {nbytes / 1e9:.3f} GB, and cache_dir_size is {self.most_bytes / 1e9:.3f} GB")
            prefix.save(self.path / f"{self._model()}-{digest}.safetensors")
            read_first(self.engine.target.group, self._trim)
        except UserError as error:
            log.warning("a prompt of %d tokens is not kept: %s", len(prefix), error)

    def _trim(self) -> None:
        left = self.most_bytes
        for path in self._files():
            left -= path.stat().st_size
            if left < 0:
                path.unlink(missing_ok=True)

    def _files(self, model: str = "") -> list[Path]:
        """Of a model or of all, the newest first."""
        found = [path for path in self.path.glob(f"{model}*") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def _model(self) -> str:
        """A digest of the engine's model and tokenizer."""
        identity = self.engine.identity()
        return hashlib.sha256(f"{identity['model']} {identity['tokenizer']}".encode()).hexdigest()[:16]
