"""Files of tasks, record by record: each knows the line that it stands on, and says what was expected there."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triforce.errors import UserError


@dataclass(frozen=True)
class Record:
    """An object of a file, which knows where it stands."""

    path: Path
    line: int
    fields: dict

    def refuse(self, expected: str) -> UserError:
        return UserError(f"{self.path}, line {self.line}: expected {expected}; found the fields "
                         f"{', '.join(self.fields) or '(none)'}")

    def find(self, *names: str):
        """The first of the fields that there is; "document.text" lies within another. None: there is none."""
        for name in names:
            value = self.fields
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None

    def text(self, *names: str) -> str:
        value = self.find(*names)
        if not isinstance(value, str):
            raise self.refuse(f"a text in the field {' or '.join(names)}")
        return value

    def texts(self, *names: str) -> list[str]:
        """A text, or a list of texts, numbers, or objects with a text."""
        value = self.find(*names)
        values = value if isinstance(value, list) else [value]
        texts = [one.get("text") if isinstance(one, dict) else one for one in values]
        if not texts or not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in texts):
            raise self.refuse(f"a text or a list of texts in the field {' or '.join(names)}")
        return [str(one) for one in texts]

    def objects(self, name: str, *parts: str) -> list[dict]:
        """A list of objects that have these texts."""
        value = self.find(name)
        if not isinstance(value, list) or not all(isinstance(one, dict) and all(isinstance(one.get(part), str)
                                                                              for part in parts) for one in value):
            raise self.refuse(f"a list of objects with {' and '.join(parts)} in the field {name}")
        return value


def records(path: Path) -> Iterator[Record]:
    """The objects of a file, one a line, or those of a JSON list.

    Raises:
        UserError: the file is not there, or something in it is no object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            start = file.read(1)
            while start.isspace():
                start = file.read(1)
            file.seek(0)
            yield from _listed(path, file.read()) if start == "[" else _lines(path, file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file of the suite") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no text in UTF-8; give a JSONL file") from None


def _lines(path: Path, file) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield _record(path, number, json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: expected a JSON object on a line of its own; {error.msg} at "
                                f"character {error.pos + 1}") from None


def _listed(path: Path, text: str) -> Iterator[Record]:
    decoder, at, line = json.JSONDecoder(), text.index("[") + 1, 1
    seen = 0  # characters whose lines are counted
    while True:
        at = re.compile(r"[\s,]*").match(text, at).end()
        line, seen = line + text.count("\n", seen, at), at
        if text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {error.lineno}: expected an object of the list that begins on line 1; "
                            f"{error.msg}") from None
        yield _record(path, line, value)


def _record(path: Path, line: int, value) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{path}, line {line}: expected a JSON object; found {type(value).__name__}")
    return Record(path, line, value)


def narratives(path: Path) -> Iterator[Record]:
    """NarrativeQA: a file, or the authors' folder with qaps.csv and tmp/ID.content."""
    if not path.is_dir():
        yield from records(path)
        return
    table = path / "qaps.csv"
    try:
        with open(table, encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            for row in rows:
                record = Record(table, rows.line_num, {key: value for key, value in row.items() if value is not None})
                story = path / "tmp" / f"{record.text('document_id')}.content"
                if not story.exists():
                    raise record.refuse(f"the story that it asks about, in {story}")
                answers = [record.text("answer1"), *filter(None, [record.find("answer2")])]
                yield Record(table, rows.line_num, {"context": story.read_text(encoding="utf-8", errors="replace"),
                                                    "question": record.text("question"), "answers": answers})
    except OSError as error:
        raise UserError(f"{table}: {error.strerror}; the folder has qaps.csv and tmp/ID.content") from None


def books(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of text files, or of JSON objects with a text."""
    if path.suffix in (".jsonl", ".json"):
        for record in records(path):
            yield record.line, record.text("text")
        return
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: has no text files (*.txt); give a folder of books")
    for file in files:
        try:
            yield 1, file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}; give a text file") from None
