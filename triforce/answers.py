"""The command line's answers: encodes what was asked, calls the engine, and prints. Text goes to stdout, all else to
stderr. Knows nothing of tensors.
"""

import os
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

from . import about
from .compare import compare
from .config import Placement, Sampling, Settings, names_of
from .errors import UserError
from .generation import as_json
from .keep import Document, fit
from .loading import load
from .prefix import asked, check_room
from .progress import Bar
from .request import DEFAULT_PROMPT_LEN, Request, about_a_document, given
from .show import as_ansi, legend
from .terminal import draw


def answer(args, group, request: Request, wants_comparison: bool) -> int:
    engine = load_engine(args, group)
    sampling = {"max_new_tokens": args.max_new_tokens, **given(args, Sampling), **wishes(args)}
    if request.prompts is not None:
        return answer_prompts(engine, request, args, sampling)
    if about_a_document(args):
        document, dropped = (None, 0) if request.document is None else encode_document(args, engine, request)
        check_before_prefill(engine, args, document, request, sampling)
        known = {"load": age(), "dropped_tokens": dropped}
        book = about.document_of(engine, args, document, request.chat)
        return about.answer(engine, args, book, list(request.questions), request.chat, sampling, known)
    ids, dropped = encode(args, engine, request.document, request, args.question)
    introduce(engine, ids, args, request)
    load_seconds = age()
    result = stream_text(engine, ids, args, sampling)
    result.stats.load, result.stats.dropped_tokens = load_seconds, dropped
    print(f"\n{result.stats}", file=sys.stderr)
    report, identical = {"checkpoint": args.checkpoint, **asdict(result)}, True
    interrupted = result.finish_reason == "interrupted"
    if wants_comparison and not interrupted:
        print("\ncomparing with autoregression ...", file=sys.stderr)
        how = {name: value for name, value in sampling.items() if name in names_of(Sampling)}
        lines, report["compare"] = compare(engine, ids, args.max_new_tokens, {**how, "seed": result.stats.seed},
                                           result.stats, not args.no_speculation)
        identical = all(report["compare"].get(f"{name}_first_difference") is None for name in ("greedy", "drawn"))
        print("\n" + "\n".join(lines), file=sys.stderr)
    print("\n" + "\n".join(result.stats.NOTES), file=sys.stderr)
    if args.json:
        print(as_json(report), flush=True)
    if interrupted:
        raise KeyboardInterrupt
    return 0 if identical else 1


def first_tokens(args, tokenizer, text: str, request: Request) -> Document:
    """A text, cut to --prompt-len tokens."""
    ids = tokenizer.encode(text)
    length = DEFAULT_PROMPT_LEN if request.is_demo and args.prompt_len is None else args.prompt_len
    if length is not None and length > len(ids):
        print(f"note: the prompt has {len(ids):,} tokens, fewer than --prompt-len {length:,}", file=sys.stderr)
    document = Document(text, ids, tokenizer.offsets)
    return document if length is None else document.cut(length, "start")


def encode(args, engine, text: str, request: Request, question: str | None) -> tuple[list[int], int]:
    """A prompt's ids: the text, cut to --prompt-len tokens, then the question; or both as a user's message.

    Returns:
        ids, and how many of the text's tokens were dropped to make it fit, by --keep.

    Raises:
        UserError: they are too many.
    """
    tokenizer = engine.tokenizer
    document = first_tokens(args, tokenizer, text, request)

    def finish(document: Document) -> list[int]:
        if args.chat:
            content = document.text + (f"\n\n{question}" if question else "")
            return engine.encode_prompt([{"role": "user", "content": content}], **request.chat)
        return document.ids + tokenizer.encode(about.as_text(question), bos=False) if question else document.ids

    if args.keep is None:
        made, dropped = finish(document), 0
    else:
        room = engine.room(args.max_new_tokens)
        alone = len(finish(Document("", [], tokenizer.offsets))) if question else 0
        if 0 < room <= alone:
            raise UserError(f"the question has {alone} tokens, and beside {args.max_new_tokens} new ones there is room "
                            f"for {room}, with at least one of the text; shorten it, or ask for fewer new ones")
        made, dropped = fit(document, finish, room, args.keep, tokenizer.bos_id)
    engine.check_len(len(made), args.max_new_tokens, text=len(document.ids), can_keep=args.keep is None)
    tell_dropped(args, dropped, len(document.ids))
    return made, dropped


def tell_dropped(args, dropped: int, total: int) -> None:
    """That so many of a text's tokens were, if any."""
    if dropped:
        kept = "start and end are" if args.keep == "both" else f"{args.keep} is"
        note = (f"note: {dropped:,} of the text's {total:,} tokens were dropped, so that prompt and output fit; its "
                f"{kept} kept (--keep {args.keep})")
        print(textwrap.fill(note, 78, subsequent_indent="  "), file=sys.stderr)


def encode_document(args, engine, request: Request) -> tuple[Document, int]:
    """A document, of which --keep leaves as many tokens as fit beside the longest question; and how many were
    dropped."""
    document = first_tokens(args, engine.tokenizer, request.document, request)
    if args.keep is None:
        return document, 0
    beside = max(about.prompt_length(engine, args, None, item["question"], request.chat)
                 for item in about.asked_of(args, request.questions).values())
    if args.chat or args.system:
        beside += about.JOINTS
    room = engine.room(args.max_new_tokens) - beside
    if room < 1:
        return document, 0  # which is told to be too long
    kept = document.cut(room, args.keep, engine.tokenizer.bos_id)
    dropped = len(document.ids) - len(kept.ids)
    tell_dropped(args, dropped, len(document.ids))
    return kept, dropped


def load_engine(args, group):
    print(f"loading {args.checkpoint} ...", file=sys.stderr, flush=True)
    return load(args.checkpoint, group=group, max_batch_size=args.batch_size, **given(args, Settings, Placement))


def stream_text(engine, ids, args, sampling):
    """Generates, printing text as it comes unless --json. Returns the Generation; after Ctrl-C, what there is of it."""
    stream = engine.stream(ids, speculate=not args.no_speculation, stop=args.stop, ignore_eos=args.ignore_eos,
                           on_prefill=Bar("prefill", len(ids)), **sampling)
    coloured = args.show_levels and wants_colours(sys.stdout)
    if coloured:
        draw(f"{legend(wants_colours(sys.stderr))}\n\n", sys.stderr)
    elif args.show_levels:
        print("note: --show-levels colours a text on a terminal, and standard output\n  is none; FORCE_COLOR=1 colours "
              "it nevertheless\n", file=sys.stderr)
    result = about.print_stream(stream, args.json, (lambda _: as_ansi(stream.spans)) if coloured else None)
    if args.show_levels:
        draw(f"\n{legend(coloured and wants_colours(sys.stderr), result.levels)}\n", sys.stderr)
    return result


def wants_colours(file) -> bool:
    """Whether a file is a terminal, or colours are wanted wherever they go (FORCE_COLOR)."""
    return file.isatty() or bool(os.environ.get("FORCE_COLOR"))


def answer_prompts(engine, request: Request, args, sampling) -> int:
    """--prompts: a line of JSON for each, in their order, as soon as its batch is done."""
    loaded, (prompts, dropped) = age(), encode_prompts(engine, request, args)  # all of them, before hours of work
    print(f"{args.checkpoint} on {engine.device}, {engine.target.dtype_name}: {len(prompts):,} prompts, "
          f"{sum(map(len, prompts)):,} tokens, {min(args.batch_size, len(prompts))} side by side", file=sys.stderr)
    begun, tokens = time.perf_counter(), 0
    about.check_seeds("--seed", sampling.get("seed"), len(prompts))
    for item in request.prompts:
        about.check_seeds(f"line {item['line']} of --prompts {args.prompts}: its seed", item.get("seed"), 1)
    seeds = about.seeds_of(request.prompts, sampling.get("seed"), engine.target.group)
    for first in range(0, len(prompts), args.batch_size):
        batch = slice(first, first + args.batch_size)
        ids = prompts[batch]
        prefill, decode = Bar("prefill", sum(map(len, ids))), Bar("decode", args.max_new_tokens * len(ids))
        try:
            results = engine.generate(ids, speculate=not args.no_speculation, stop=args.stop,
                                      ignore_eos=args.ignore_eos, on_prefill=prefill,
                                      on_decode=decode.count, **{**sampling, "seed": seeds[batch]})
        finally:
            prefill.close()
            decode.close()
        for index, result in enumerate(results, first):
            result.stats.dropped_tokens, result.stats.load = dropped[index], loaded
            print(as_json({"index": index, **asdict(result)}), flush=True)
            tokens += len(result.tokens)
        speed = tokens / (time.perf_counter() - begun)
        print(f"{first + len(ids)} of {len(prompts)} prompts, {tokens:,} new tokens, {speed:.1f} a second, prefill "
              "included", file=sys.stderr)
    return 0


def encode_prompts(engine, request: Request, args) -> tuple[list[list[int]], list[int]]:
    """Ids of each of --prompts, and how many tokens of each were dropped. Raises UserError with the line of one."""
    prompts, dropped = [], []
    for item in request.prompts:
        try:
            question = item.get("question", args.question)
            if "messages" in item:
                messages = asked(item["messages"], question) if question else item["messages"]
                ids, count = engine.encode_prompt(messages, **request.chat), 0
            else:
                ids, count = encode(args, engine, item["prompt"], request, question)
            prompts.append(engine.encode_prompt(ids))
            dropped.append(count)
            engine.check_len(len(prompts[-1]), args.max_new_tokens)
        except UserError as error:
            raise UserError(f"line {item['line']} of --prompts {args.prompts}: {error}") from None
    return prompts, dropped


def check_before_prefill(engine, args, document: Document | None, request: Request, sampling: dict) -> None:
    """Raises UserError for what a generation over a document would refuse, before hours of prefill.

    Args:
        document: None: it is in a file, or there is none.
    """
    engine.stream([0], stop=args.stop, **sampling)  # checks, and computes nothing until it is iterated over
    count, questions = args.num_samples or 1, about.asked_of(args, request.questions)
    about.check_seeds("--seed", sampling.get("seed"), len(questions) * count)
    for what, item in questions.items():
        about.check_seeds(f"{what}: its seed", item.get("seed"), count)
    if document is None:  # the document is in a file, and will be there at once, or there is none
        return
    if args.chat or args.system:
        engine.encode_beginning(about.messages_of(args, "."), **request.chat)  # there is a template
    if args.save_prefix and args.save_every is None:  # or the prefill looks
        check_room(args.save_prefix, engine, len(document.ids))
    can_keep = not (args.keep or args.interactive or args.save_prefix)
    # The longest first: what is advised for it serves all, and of what does not fit one is put into a template.
    for what, item in sorted(questions.items(), reverse=True,
                             key=lambda named: len(engine.tokenizer.encode(named[1]["question"]))):
        try:
            length = about.prompt_length(engine, args, document, item["question"], request.chat)
            engine.check_len(length, args.max_new_tokens, text=len(document.ids), can_keep=can_keep)
        except UserError as error:
            raise UserError(f"{what}: {error}" if what else str(error)) from None


def wishes(args) -> dict:
    """Further options of `Engine.generate` for which a flag was given."""
    names = ("stop_token_ids", "logprobs")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def age() -> float:
    """Seconds since this process was started, or the torchrun that started it."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else "self"
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):  # not Linux
        return time.process_time()


def introduce(engine, ids, args, request: Request) -> None:
    """What is about to happen: the model, the prompt, and how much of it drafts are read from."""
    budget = engine.resolve_budget(len(ids))
    lines = [f"{args.checkpoint} on {engine.device}, {engine.target.dtype_name}, {len(ids):,} prompt tokens"]
    if args.checkpoint == "tiny":
        lines.append(f"(the embedded pair: a toy of {engine.num_parameters / 1e6:.1f} million parameters "
                     "that writes what it can)")
    if 0 < budget < len(ids) and not args.no_speculation:
        lines.append(f"drafts read {budget:,} of these tokens (--budget), every check reads all of them")
    if request.is_demo:
        end = " ".join(engine.tokenizer.decode(ids[-60:], continues=True).split())
        lines += ["The prompt is the beginning of CPython's language reference. It ends:", f"  ... {end[-140:]}"]
    print("\n".join(textwrap.fill(line, 78, subsequent_indent="  ") for line in lines) + "\n", file=sys.stderr)
