"""A folder of prompt-cache files: a prompt finds the one that has its beginning."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import parse_size
from ..errors import UserError
from ..parallel import read_first, together
from .prompt_cache import SHARED_FROM, Prefix, common_length, layout_of, opened
from .prompt_cache_file import VERSION, Altered, PrefixReader, remove_leftovers
from .prompt_cache_path import as_path

if TYPE_CHECKING:
    from .engine import Engine


class PromptCacheFolder:
    """See the module. Several processes may share a folder, of whatever models.

    Args:
        most_bytes: of all files. The newest stay. A file that is read counts as new.
    """

    def __init__(self, engine: "Engine", path: str | Path, most_bytes: int | str):
        self.engine, self.path = engine, as_path(path)
        self.most_bytes = parse_size(most_bytes, "cache_dir_size")
        self._tokens: dict[tuple[Path, int], list[int]] = {}  # by file: those with keys and values
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot keep prompts in {self.path}: {error.strerror}; give another cache_dir") from None

    def find(self, tokens: list[int]) -> tuple[int, Path | None]:
        """How many tokens of a text a file has, whole flush intervals, and which; 0, None where none is worth
        reading."""
        model = self._model()  # of which all ranks have a part
        return read_first(self.engine.target.group, lambda: self._find(tokens, model))

    @contextlib.contextmanager
    def reader(self, tokens: list[int]) -> Iterator[PrefixReader | None]:
        """The file that has most of the beginning of a text, open for reading; None where none has enough of it. What
        turns out to be damaged is removed."""
        group, readers, reader = self.engine.target.group, [], None
        _, path = self.find(tokens)
        with contextlib.ExitStack() as stack:
            if path is not None:
                stack.enter_context(removing(path))
                with contextlib.suppress(UserError, OSError):  # another process may have removed it
                    together(group, lambda: readers.append(stack.enter_context(opened(path, self.engine))))
                    reader = readers[0]
                    os.utime(path)
            yield reader

    def _find(self, tokens: list[int], model: str) -> tuple[int, Path | None]:
        """At least half of the text, and half of the file, must be the same."""
        found, unit = (0, None), self.engine.settings.flush_interval
        files = {(path, about.st_ino): path for path, about in self._files(model)}
        self._tokens = {key: held for key, held in self._tokens.items() if key in files}
        for key, path in files.items():
            if key not in self._tokens:
                self._tokens[key] = []
                with contextlib.suppress(UserError), removing(path), opened(path, self.engine) as reader:
                    self._tokens[key] = reader.tokens[: reader.layout.length]
            held = self._tokens[key]
            same = common_length(held, tokens) // unit * unit
            if same > found[0] and same >= max(SHARED_FROM, len(tokens) // 2, len(held) // 2):
                found = same, path
        return found

    def save(self, prefix: Prefix) -> None:
        """Writes a document, in the place of the oldest ones. What the disk refuses is logged."""
        nbytes = layout_of(self.engine, len(prefix), prefix.num_shared, prefix.store).header("")[2]
        digest = hashlib.sha256(json.dumps(prefix.tokens).encode()).hexdigest()[:32]
        try:
            read_first(self.engine.target.group, lambda: self._make_room(nbytes))
            prefix.save(self.path / f"{self._model()}-{digest}.safetensors")
        except (UserError, OSError) as error:
            logging.getLogger("triforce").warning("a prompt of %d tokens is not kept: %s", len(prefix), error)

    def _make_room(self, nbytes: int) -> None:
        remove_leftovers(self.path, "*.safetensors")
        files = self._files()
        limit = min(self.most_bytes, sum(about.st_size for _, about in files) + shutil.disk_usage(self.path).free)
        if nbytes > limit:
            raise UserError(f"it takes {nbytes / 1e9:.3f} GB, and cache_dir_size or the disk allow {limit / 1e9:.3f}")
        for path, about in files:
            nbytes += about.st_size
            if nbytes > limit:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _files(self, model: str = "") -> list[tuple[Path, os.stat_result]]:
        """Of a model or of all, the newest first."""
        found = []
        # Digests of the model and of the tokens.
        for path in self.path.glob(f"{model or 16 * '[0-9a-f]'}-{32 * '[0-9a-f]'}.safetensors"):
            with contextlib.suppress(OSError):  # other processes remove files, too
                found.append((path, path.stat()))
        return sorted(found, key=lambda one: one[1].st_mtime, reverse=True)

    def _model(self) -> str:
        """A digest of what the numbers in a file depend on."""
        identity = self.engine.identity()
        of = f"{identity['model']} {identity['tokenizer']} {self.engine.target.dtype} {VERSION}"
        return hashlib.sha256(of.encode()).hexdigest()[:16]


@contextlib.contextmanager
def removing(path: Path) -> Iterator[None]:
    """A file that turns out to be damaged within is removed."""
    try:
        yield
    except Altered:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
