"""The prompts of TriForce's and MagicDec's data sets, from files that you have, as lines for `generate.py --prompts`.

    python benchmarks/prompts.py gs books/ --checkpoint DIR --tokens 122880 --out prompts.jsonl
    python generate.py --checkpoint DIR --prompts prompts.jsonl --max-new-tokens 256

    gs          PG-19, as TriForce takes it: the beginning of each book that is long enough
    lwm         NarrativeQA, as TriForce takes it: a request for a summary of each book or script
    magicdec    PG-19, as MagicDec takes it: stretches of a book, without its first 8,000 tokens

A file is a text, or JSON lines with the text in "text", "context" or "document": {"text"}. A folder stands for the
texts in it (*.txt, and NarrativeQA's *.content). Nothing is downloaded.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from harness import run_or_plot

from triforce.errors import UserError
from triforce.hf.folders import resolve
from triforce.hf.tokenizer import Tokenizer

SUMMARY = ("You are a helpful assistant. USER: Please read a part of the book below, and then give me the summary.\n"
           "[start of the book]\n",
           "\n[end of the book]\n\nNow you have read it. Please summarize it for me. First, tell me the title and the "
           "author, and then tell the story in 500 words.\n\nASSISTANT: ")
SKIPPED = 8_000  # tokens, by MagicDec: title pages and contents


def read_books(path: Path) -> Iterator[str]:
    """The texts of a file or a folder.

    Raises:
        UserError: it cannot be read, or a line of JSON has no text.
    """
    try:
        files = sorted([*path.glob("*.txt"), *path.glob("*.content")]) if path.is_dir() else [path]
        for file in files:
            if file.suffix == ".jsonl":
                with open(file, encoding="utf-8") as lines:
                    yield from (text_of(file, number, line) for number, line in enumerate(lines, 1) if line.strip())
            else:
                yield file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a text, a file of JSON lines, or a folder of texts") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8; give a file of JSON lines") from None


def text_of(file: Path, number: int, line: str) -> str:
    try:
        fields = json.loads(line)
        document = fields.get("document")
        text = fields.get("text") or fields.get("context") or (document or {}).get("text")
    except (json.JSONDecodeError, AttributeError):
        text = None
    if not isinstance(text, str):
        raise UserError(f'{file}, line {number}: needs a JSON object with a text in "text", "context" or "document": '
                        '{"text"}')
    return text


def prompts_of(kind: str, books: Iterator[str], tokenizer: Tokenizer, tokens: int) -> Iterator[list[int]]:
    """Ids of each prompt, at most `tokens`.

    Raises:
        UserError: the request for a summary alone takes more.
    """
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    last = None
    for text in books:
        if kind == "gs":
            ids = tokenizer.encode(text)
            if len(ids) >= tokens:
                yield ids[:tokens]
        elif kind == "magicdec":
            ids = tokenizer.encode(text, bos=False)[SKIPPED:]
            room = tokens - len(bos)
            for start in range(0, len(ids) - room + 1, room):
                yield bos + ids[start : start + room]
        elif text != last:  # NarrativeQA has a story once for each question about it
            before, after = tokenizer.encode(SUMMARY[0]), tokenizer.encode(SUMMARY[1], bos=False)
            room = tokens - len(before) - len(after)
            if room < 1:
                raise UserError(f"--tokens {tokens} leaves no room beside the request for a summary "
                                f"({len(before) + len(after)} tokens); give more")
            story = tokenizer.encode(text[3 : 1024 * 500], bos=False)  # as TriForce cuts it, in characters
            yield before + story[:room] + after
        last = text


def run(args) -> None:
    tokenizer = Tokenizer(resolve(args.checkpoint))
    written = 0
    with open(args.out, "w", encoding="utf-8") as file:
        for ids in prompts_of(args.kind, read_books(args.path), tokenizer, args.tokens):
            if written == args.count:
                break
            file.write(json.dumps({"prompt": tokenizer.decode(ids)}) + "\n")
            written += 1
    if not written:
        raise UserError(f"{args.path}: holds no text of {args.tokens:,} tokens; give a longer one, or fewer --tokens")
    print(f"{args.out}: {written} prompts of at most {args.tokens:,} tokens")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kind", choices=["gs", "lwm", "magicdec"])
    p.add_argument("path", type=Path, help="a file, or a folder of texts")
    p.add_argument("--checkpoint", default="tiny", help="whose tokenizer counts")
    p.add_argument("--tokens", type=int, default=16_384, help="of a prompt, at most")
    p.add_argument("--count", type=int, default=10, help="of prompts, at most")
    p.add_argument("--out", required=True, help="the file of JSON lines")
    p.set_defaults(plot=None)
    run_or_plot(run, None, p.parse_args())


if __name__ == "__main__":
    main()
