"""Tasks read from the files of published suites, which the user has. Nothing is downloaded.

    kind             file                                               what is asked, how it is scored
    ruler            RULER's JSONL: input, outputs                      as it stands there
    narrativeqa      JSONL, or the folder of the authors' repository    a question about a book or script; F1
    narrativeqa-lwm  the same                                           TriForce's: a summary of the book; no score
    longbench-v2     data.json or JSONL                                 one of four choices
    infinitebench    JSONL, named after its task: passkey.jsonl         as there, without summaries and Chinese
    helmet-json-kv   HELMET's recall: JSONL                             the value of a key in a JSON object
    helmet-ruler     HELMET's recall: JSONL                             RULER's needles
    helmet-qa        HELMET's questions over passages: JSONL            a short answer, without demonstrations
    pg19             text files, a folder of them, or JSONL: text       TriForce's: 256 more tokens; no score
    pg19-magicdec    the same                                           MagicDec's: 8,000 tokens skipped; no score

A JSONL file has an object a line; a JSON list of objects is read, too. The prompts are those of the suites, for
models that continue a text; NarrativeQA has none, so its questions are put as HELMET puts them. Where a prompt is too
long, its document is cut in the middle, and nothing else is.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from records import books, narratives, records
from ruler import ASKED_FOR_MORE, ASKED_FOR_ONE
from samples import Sample, cut_to_fit

from triforce.errors import UserError

LWM = ("You are a helpful assistant. USER: Please read a part of the book below, and then give me the summary.\n"
       "[start of the book]\n",
       "\n[end of the book]\n\nNow you have read it. Please summarize it for me. First, tell me the title and the "
       "author, and then tell the story in 500 words.\n\nASSISTANT: ")
STORY = ("You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
         "concisely as you can, using a single phrase if possible.\n\n", "\n\nQuestion: {question}\nAnswer:")
CHOICE = ("Please read the following text and answer the question below.\n\n<text>\n",
          "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n"
          "(D) {D}\n\nFormat your response as follows: \"The correct answer is (insert answer here)\".")
PAIR = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
PASSAGES = ("Use the given documents to write a concise and short answer to the question. Write your answer in the "
            "following format:\nAnswer: [answer]\n\n", "\n\nQuestion: {question}\nAnswer:")
HIDDEN = ("There is an important info hidden inside a lot of irrelevant text. Find it{more}. I will quiz you about the "
          "important information there.\n\n")
OPTIONS = "A. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"
# InfiniteBench's tasks: what stands before and after the context, tokens of an answer, the score
INFINITEBENCH = {
    "passkey": (HIDDEN.format(more=" and memorize them"), "\n\n{input}\n\nThe pass key is", 6, "first_number"),
    "number_string": (HIDDEN.format(more=""), "\n\n{input}\n\nThe sequence of digits is", 12, "first_number"),
    "kv_retrieval": (PAIR, "\n\n{input}", 50, "whole_word"),
    "longbook_qa_eng": ("Read the book and answer the question. Be very concise in your answer.\n\n",
                        "\n\nQuestion: {input}\nAnswer:", 40, "f1"),
    "longbook_choice_eng": ("Read the book and answer the question.\n\n",
                            "\n\nQuestion: {input}\n" + OPTIONS + "The letter of the correct answer is", 40,
                            "infinitebench_choice"),
    "longdialogue_qa_eng": ("Below is a dialogue script where one random occurrence of a character name is replaced "
                            "with \"$$MASK$$\", and you should try to guess who that character is.\n\n",
                            "\n\nThe name that has been replaced with $$MASK$$ is likely", 40, "character"),
    "math_find": ("What is {target} in the following list?\n\n", "\n\n{input}", 3, "number"),
    "math_calc": ("Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: "
                  "[1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: ", "\nValues:", 30_000,
                  "leading_numbers"),
    "code_run": ("There is a function called {func} in the following Python code.\n\n",
                 "\n\nPlease compute the exact value of {call}. The value of {call} is", 5, "last_number"),
    "code_debug": ("Following is a Python code where exactly one of the functions/methods has a deliberate error that "
                   "makes it crash.\n\n", "\n\nOptions:\n" + OPTIONS + "The correct option is:", 5,
                   "infinitebench_debug"),
}
RULER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
SKIPPED = 8_000  # tokens, by MagicDec: title pages and contents


@dataclass(frozen=True)
class Asked:
    """A record as a question, before it is made to fit."""

    before: str
    document: str
    after: str
    answers: list
    score: str | None
    new_tokens: int
    task: str
    keep: str = "both"


def narrativeqa(path: Path) -> Iterator[tuple[int, Asked]]:
    for record in narratives(path):
        document, question = record.text("context", "document.text"), record.text("input", "question.text", "question")
        yield record.line, Asked(STORY[0], document, STORY[1].format(question=question),
                                 record.texts("answers", "answer"), "f1", 100, "narrativeqa")


def summaries(path: Path) -> Iterator[tuple[int, Asked]]:
    """A story once, however many questions there are about it."""
    last = None
    for record in narratives(path):
        document = record.text("context", "document.text")
        if document != last:
            kept = document[3 : 1024 * 500]  # as TriForce cuts it, in characters
            yield record.line, Asked(LWM[0], kept, LWM[1], [], None, 256, "narrativeqa-lwm", "start")
        last = document


def longbench_v2(path: Path) -> Iterator[tuple[int, Asked]]:
    for record in records(path):
        answer = record.text("answer")
        if answer not in tuple("ABCD"):
            raise record.refuse(f"A, B, C or D in the field answer (it is {answer!r})")
        choices = {letter: record.text(f"choice_{letter}").strip() for letter in "ABCD"}
        after = CHOICE[1].format(question=record.text("question").strip(), **choices)
        yield record.line, Asked(CHOICE[0], record.text("context").strip(), after, [answer], "longbench_choice", 128,
                                 "longbench-v2")


def infinitebench(path: Path) -> Iterator[tuple[int, Asked]]:
    task = path.stem
    if task not in INFINITEBENCH:
        raise UserError(f"{path}: a file of InfiniteBench is named after its task, one of {', '.join(INFINITEBENCH)}")
    before, after, new_tokens, score = INFINITEBENCH[task]
    for record in records(path):
        said = {"input": record.text("input")}
        answers: list = record.texts("answer")
        if "{A}" in after:
            options = record.texts("options")
            if len(options) != 4 or answers[0] not in options:
                raise record.refuse("four options, the answer among them")
            said |= dict(zip("ABCD", options, strict=True))
            answers = ["ABCD"[options.index(answers[0])], answers[0]]
        if "{call}" in after:
            found = re.search(r"(func_[0-9]+)\(-?[0-9]+\)", said["input"])
            if found is None:
                raise record.refuse("a call such as func_1(2) in the field input")
            said |= {"call": found[0], "func": found[1]}
        if "{target}" in before:
            found = re.search(r"(The .+) of", said["input"])
            if found is None:
                raise record.refuse("what is to be found, such as 'The largest number of', in the field input")
            said["target"] = found[1].lower()
        if score == "leading_numbers":
            answers = [int(value) for value in answers]
        yield record.line, Asked(before.format(**said), record.text("context"), after.format(**said), answers, score,
                                 new_tokens, f"infinitebench/{task}")


def helmet_json_kv(path: Path) -> Iterator[tuple[int, Asked]]:
    for record in records(path):
        demos = record.find("demos") or []
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in demos):
            raise record.refuse("pairs [key, value] in the field demos")
        shown = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in demos[:2])
        after = f"\n\n{PAIR}{shown}Key: {record.text('question')}\nCorresponding value:"
        yield record.line, Asked("", record.text("context"), after, record.texts("answer"), "substring", 100,
                                 "helmet/json_kv")


def helmet_ruler(path: Path) -> Iterator[tuple[int, Asked]]:
    for record in records(path):
        answers, kind = record.texts("outputs", "answer"), record.text("type_needle_v")
        template = ASKED_FOR_ONE if len(answers) == 1 else ASKED_FOR_MORE
        before, after = template.split("{context}")
        names = {"one": kind.removesuffix("s"), "kind": kind, "query": record.text("query")}
        yield record.line, Asked(before.format(**names), record.text("context"), after.format(**names), answers,
                                 "every_part", 100 if kind == "uuids" else 50, "helmet/ruler")


def helmet_qa(path: Path) -> Iterator[tuple[int, Asked]]:
    for record in records(path):
        passages = "\n\n".join(f"Document (Title: {one['title']}): {one['text']}"
                               for one in record.objects("ctxs", "title", "text"))
        after = PASSAGES[1].format(question=record.text("question"))
        yield record.line, Asked(PASSAGES[0], passages, after, record.texts("answers"), "line_substring", 20,
                                 "helmet/qa")


def ruler_file(path: Path) -> Iterator[tuple[int, Asked]]:
    """Prompts are taken as they are: cutting them could cut the needle. The folder names the task, as there."""
    task = path.parent.name if path.stem.startswith(("validation", "test")) else path.stem
    family = task.split("_")[0]
    for record in records(path):
        prompt = record.text("input") + (record.find("answer_prefix") or "")
        score = "any_part" if family == "qa" else "every_part"
        yield record.line, Asked(prompt, "", "", record.texts("outputs"), score, RULER_TOKENS.get(family, 128),
                                 f"ruler/{task}")


def continued(path: Path, tokenizer, room: int) -> Iterator[list[int]]:
    """TriForce's prompts: the beginning of each book that is long enough."""
    for _, text in books(path):
        ids = tokenizer.encode(text)
        if len(ids) >= room:
            yield ids[:room]


def stretches(path: Path, tokenizer, room: int) -> Iterator[list[int]]:
    """MagicDec's prompts: a book without its first tokens, in stretches that begin as a text does."""
    for _, text in books(path):
        ids = tokenizer.encode(text)[SKIPPED:]
        for start in range(0, len(ids) - room + 1, room):
            bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            yield bos + ids[start + len(bos) : start + room]


ASKS: dict[str, Callable[[Path], Iterator[tuple[int, Asked]]]] = {
    "ruler": ruler_file, "narrativeqa": narrativeqa, "narrativeqa-lwm": summaries, "longbench-v2": longbench_v2,
    "infinitebench": infinitebench, "helmet-json-kv": helmet_json_kv, "helmet-ruler": helmet_ruler,
    "helmet-qa": helmet_qa}
CONTINUES = {"pg19": continued, "pg19-magicdec": stretches}
KINDS = (*ASKS, *CONTINUES)


def read(kind: str, path: Path, tokenizer, *, length: int, count: int, new_tokens: int | None = None) -> list[Sample]:
    """The first `count` tasks of a file; prompt and answer have at most `length` tokens.

    Args:
        kind: one of KINDS. new_tokens: of an answer; None: as the suite has it.

    Raises:
        UserError: the file does not fit: its line, and what was expected there.
    """
    samples: list[Sample] = []
    if kind in CONTINUES:
        more = new_tokens or 256
        _check_room(length, more, kind)
        for prompt in CONTINUES[kind](path, tokenizer, length - more):
            samples.append(Sample(kind, len(samples), prompt, more))
            if len(samples) == count:
                break
    else:
        for line, asked in ASKS[kind](path):
            samples.append(_fitted(path, line, asked, tokenizer, length, new_tokens or asked.new_tokens))
            if len(samples) == count:
                break
    if not samples:
        remedy = "a file with a task a line"
        if kind in CONTINUES:
            remedy = f"a book of {length:,} tokens, or a smaller --length"
        raise UserError(f"{path}: holds nothing to ask; give {remedy}")
    return samples


def _check_room(length: int, new_tokens: int, task: str) -> None:
    if length <= new_tokens:
        raise UserError(f"--length {length} leaves no room beside {new_tokens} new tokens of {task}; give a larger "
                        "one, or fewer --new-tokens")


def _fitted(path: Path, line: int, asked: Asked, tokenizer, length: int, new_tokens: int) -> Sample:
    _check_room(length, new_tokens, asked.task)
    try:
        prompt, dropped = cut_to_fit(asked.before, asked.document, asked.after, tokenizer, length - new_tokens,
                                     asked.keep)
    except UserError as error:
        raise UserError(f"{path}, line {line}: {error}") from None
    return Sample(asked.task, line, prompt, new_tokens, asked.answers, asked.score, dropped)
