"""What the tiny pair reads: plain text from books and documentation packages, and made-up facts to recall.

    python benchmarks/tiny_data.py PACKAGES BOOKS .train

PACKAGES has the unpacked Debian packages of `SOURCES`, a folder each, and BOOKS the folders `train` and `heldout` of
text files. The text of HTML is laid out as Sphinx's text builder does (underlined titles, indented code), because the
library's default prompt looks like that. The default prompt itself is kept out: files that share text with it are
dropped.
"""

import gzip
import lzma
import re
import subprocess
import sys
import textwrap
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np

# The recall task. A name is three syllables, one token each; a fact is a line on which a key is directly followed by
# its value, and a question is the beginning of that line again. So the answer is a matter of plain induction: "what
# came after this token last time?", three times in a row.
#
#     Remember: QibVuxZaj MepTolKud.
#
# A name starts with a syllable of FIRST (with a space before it) and goes on with two of REST. No syllable occurs twice
# among the facts of one document, so every token of a key says alone which fact is meant.


def _syllables():
    """Rare consonant-vowel-consonant syllables, in a fixed shuffled order."""
    made = [a + b + c for a in "BDFGHJKLMNPQRTVWXZ" for b in "aeiou" for c in "bdfgjkmpqvxz"]
    common = ("Bad Bag Bed Big Bob Bog Box Bud Bug Dad Dig Dog Dug Fad Fed Fig Fix Fob Fog Fox God Gap Had Hid Him "
              "Hum Hub Jab Jam Job Jog Jug Kid Lad Lag Lap Led Leg Lid Lip Log Mad Map Max Mix Mob Mud Mug Nap Nod "
              "Pad Peg Pig Pod Pop Rag Ram Rap Red Rib Rid Rig Rim Rip Rob Rod Rub Rug Rum Tab Tag Tap Tax Tip Tom "
              "Top Tub Tug Vex Wax Web Wed Wig Zip Max Rex Dim Dip Gem Gum Ham Hem Hop Jim Ted Tim Tod Dep Def Rad "
              "Pub Num Rem Lex Nov Feb Dev Ref Fib Lib Mod Bom Map Rav Nad").split()
    made = [s for s in made if s not in common]
    return [made[i] for i in np.random.default_rng(0).permutation(len(made))]


FIRST, REST = np.split(np.array(_syllables()[:256]), [96])
MAX_FACTS = min(len(FIRST) // 2, len(REST) // 4)  # facts in one document, at two names a fact


def make_facts(rng, n):
    """n pairs (key, value), no two of whose names share a syllable."""
    first, rest = rng.permutation(FIRST)[: 2 * n], rng.permutation(REST)[: 4 * n]
    names = [a + b + c for a, b, c in zip(first, rest[0::2], rest[1::2], strict=True)]
    return list(zip(names[0::2], names[1::2], strict=True))


def make_recall_document(rng, encode, book, length, depth, n_facts=9, bos=1):
    """A stretch of a book with facts on lines of their own, then the question for one of them.

    encode: text -> ids, without <s>. depth: where the asked fact stands, from 0 (the beginning) to 1 (the end); the
    others stand at random places. Returns (prompt, answer): ids, at most `length` together, and less by under 1%.
    """
    facts = make_facts(rng, n_facts)
    fact_ids = [encode(f"Remember: {key} {value}.\n") for key, value in facts]
    question, answer = encode(f"Remember: {facts[0][0]}"), encode(f" {facts[0][1]}")
    room = length - 1 - len(question) - len(answer) - sum(map(len, fact_ids))
    chars = int(room * 4.5) + 1000  # more text than needed
    start = book.find("\n", int(rng.integers(0, max(1, len(book) - chars)))) + 1
    lines, ends = [], [0]
    for line in book[start : start + chars].splitlines(keepends=True):
        ids = encode(line)
        if ends[-1] + len(ids) > room:
            break
        lines.append(ids)
        ends.append(ends[-1] + len(ids))
    places = [depth, *rng.random(n_facts - 1)]
    before = [int(np.searchsorted(ends, place * ends[-1])) for place in places]  # which line each fact stands before
    prompt = [bos]
    for i in range(len(lines) + 1):
        for at, ids in zip(before, fact_ids, strict=True):
            prompt += ids if at == i else []
        prompt += lines[i] if i < len(lines) else []
    return prompt + question, answer


# -- from HTML to text, in the manner of Sphinx's text builder ---------------------------------------------------------

SKIP_TAGS = {"script", "style", "nav", "header", "footer", "form", "button", "svg", "head", "noscript", "img"}
SKIP_CLASS = re.compile(
    r"headerlink|related|sphinxsidebar|navbar|toctree|contents\b|genindex|breadcrumb|footer|NAVHEADER"
    r"|NAVFOOTER|navigation|editsection|t-navbar|printfooter|catlinks|(?<!with)sidebar|rust-example|mobile|menu")
TITLES = {"h1": "*", "h2": "=", "h3": "-", "h4": "~", "h5": "^", "h6": "^"}
MARKS = {"code": '"', "tt": '"', "kbd": '"', "samp": '"', "em": "*", "i": "*", "var": "*", "strong": "**", "b": "**"}
BLOCKS = {"p", "pre", "ul", "ol", "dl", "table", "div", "section", "blockquote", "article", "main", "body", "center",
          "figure", "aside", "details", "li", "dd", "dt", "tr", "hr", "address", "fieldset", *TITLES}
WIDTH = 72


def skipped(node) -> bool:
    return not isinstance(node.tag, str) or node.tag in SKIP_TAGS or SKIP_CLASS.search(node.get("class") or "")


def inline(node) -> str:
    """Text of an element and its children, without line structure."""
    parts = [node.text or ""]
    for child in node:
        text = "" if skipped(child) else "\n" if child.tag == "br" else inline(child)
        mark = MARKS.get(child.tag, "")
        if 1 < len(text.strip()) < 60 and mark[:1] not in text:
            text = f"{mark}{text.strip()}{mark}"
        parts += [text, child.tail or ""]
    return "".join(parts)


def write_block(node, indent, out) -> None:
    """Appends the lines of an element."""
    pad, tag = " " * indent, node.tag
    if tag in TITLES:
        title = " ".join(inline(node).replace("¶", "").replace("**", "").split())
        out += ["", pad + title, pad + TITLES[tag] * len(title), ""] if title else []
    elif tag == "pre":
        code = "".join(node.itertext()).expandtabs(4).strip("\n").splitlines()
        out += [pad + "   " + line for line in code[:120]] + [""]
    elif tag == "tr":
        cells = [" ".join(inline(cell).split()) for cell in node if cell.tag in ("td", "th")]
        out += [pad + "   ".join(cells)] if any(cells) else []
    elif tag == "li":
        item = []
        write_children(node, indent + 2, item)
        out += [pad + "* " + item[0].lstrip(), *item[1:]] if item else []
    else:
        write_children(node, indent + 3 * (tag in ("dd", "blockquote")), out)


def write_children(node, indent, out) -> None:
    """Blocks of an element; loose text between them makes paragraphs."""
    def paragraph(loose) -> None:
        text, pad = " ".join("".join(loose).replace("¶", "").split()), " " * indent
        if text:
            width = max(40, WIDTH - indent) + indent
            out.extend([*textwrap.wrap(text, width, initial_indent=pad, subsequent_indent=pad, break_long_words=False,
                                       break_on_hyphens=False), ""])

    loose = [node.text or ""]
    for child in node:
        if skipped(child):
            pass
        elif child.tag in BLOCKS or any(inner.tag in BLOCKS for inner in child.iterdescendants()):
            paragraph(loose)
            loose = []
            write_block(child, indent, out)
        else:
            mark, text = MARKS.get(child.tag, ""), inline(child)
            loose.append(f"{mark}{text.strip()}{mark}" if 1 < len(text.strip()) < 60 else text)
        loose.append(child.tail or "")
    paragraph(loose)


def html_to_text(data: bytes) -> str:
    from lxml import etree, html

    try:
        root = html.fromstring(data)
    except (etree.ParserError, ValueError):  # an empty or broken page
        return ""
    for path in ("//*[@role='main']", "//div[@class='body']", "//main", "//article", "//div[@id='mw-content-text']",
                 "//section[@id='main-content']", "//div[@id='content']", "//div[@id='docs-body']", "//body", "."):
        found = root.xpath(path)
        if found:
            out: list[str] = []
            write_children(found[0], 0, out)
            return "\n".join(out)
    return ""


# -- packages ----------------------------------------------------------------------------------------------------------

# HTML in usr/share/doc/PACKAGE: at most so many characters. Licences: triforce/tiny/README.md.
HTML = {
    "python-django-doc": 5e6, "python-sqlalchemy-doc": 4e6, "sphinx-doc": 2e6, "docutils-doc": 2e6,
    "python-jinja2-doc": 1e6, "python-flask-doc": 1e6, "python-werkzeug-doc": 1e6, "python-pytest-doc": 2e6,
    "python-hypothesis-doc": 1e6, "python-attr-doc": 1e6, "python-celery-doc": 2e6, "python-traitlets-doc": 1e6,
    "python-mako-doc": 1e6, "python-pygments-doc": 1e6, "python-setuptools-doc": 1e6, "python-tornado-doc": 1e6,
    "twisted-doc": 2e6, "cython-doc": 1e6, "golang-1.19-doc": 1e6, "haskell98-report": 1.5e6, "postgresql-doc-15": 5e6,
    "zsh-doc": 1.2e6,
}
HELD_OUT = "python-tornado-doc"
# Package, files in usr/share, how to read them, at most so many characters
SOURCES = [(package, f"doc/{package}/**/*.html", "html", most) for package, most in HTML.items()] + [
    ("pypy3-doc", "doc/pypy3/**/*.html", "html", 1e6), ("nim-doc", "doc/nim/html/*.html", "html", 1.5e6),
    ("rust-doc", "doc/rust-doc/html/reference/**/*.html", "html", 2e6),
    ("rust-doc", "doc/rust-doc/html/book/*.html", "html", 2e6),
    ("rust-doc", "doc/rust-doc/html/nomicon/*.html", "html", 1e6),
    ("ada-reference-manual-2012", "doc/ada-reference-manual-2012/arm2012.txt/*.TXT", "text", 2.5e6),
    ("ghc-doc", "doc/ghc-doc/html/users_guide/**/*.html", "html", 2.5e6),
    ("fp-docs-3.2.2", "doc/fp-docs/3.2.2/ref/*.html", "html", 1.5e6), ("lua5.4", "man/man1/*.gz", "man", 1e5),
    ("swi-prolog-doc", "swi-prolog/doc/**/*.html", "html", 2e6), ("r-doc-html", "**/R-lang.html", "html", 1e6),
    ("r-doc-html", "**/R-intro.html", "html", 1e6), ("guile-3.0-doc", "info/guile-3.0/*.info-*.gz", "info", 2.5e6),
    ("mit-scheme-doc", "info/mit-scheme-ref.info-*.gz", "info", 1.2e6),
    ("sbcl-doc", "info/sbcl.info-*.gz", "info", 1e6),
    ("cppreference-doc-en-html", "cppreference/doc/html/en/cpp/language/*.html", "html", 1.5e6),
    ("cppreference-doc-en-html", "cppreference/doc/html/en/c/language/*.html", "html", 1e6),
    ("sqlite3-doc", "doc/sqlite3/*.html", "html", 3e6), ("perl-doc", "perl/5.36.0/pod/*.pod", "pod", 5e6),
    ("git-doc", "doc/git/html/*.html", "html", 2e6), ("vim-runtime", "vim/vim90/doc/*.txt", "vim", 2.5e6),
    ("bash-doc", "doc/bash/*.html", "html", 1e6), ("tcl8.6-doc", "man/man3/*.gz", "man", 1e6),
    ("manpages", "man/man7/*.gz", "man", 1e6), ("debian-policy", "doc/debian-policy/policy.html/*.html", "html", 1e6),
    ("developers-reference", "developers-reference/*.html", "html", 1e6),
    ("autoconf-doc", "info/autoconf.info.gz", "info", 1e6),
    ("cmake-doc", "doc/cmake-data/html/manual/*.html", "html", 1.2e6),
    ("nodejs-doc", "doc/nodejs/api/*.html", "html", 2e6),
    ("apache2-doc", "doc/apache2-doc/manual/en/**/*.html", "html", 2e6),
]
NOT_PROSE = re.compile(
    r"genindex|search\.html|modindex|_modules|_sources|changelog|changes|/all\.html|theindex|objects\.inv|"
    r"tocs?\.html|doc-contents|perltoc|uni_prop|perl5\d+delta|perlhist|_autosummary|coverage")
CONVERTERS = {"pod": ["pod2text", "-i3", "-w72"], "man": ["mandoc", "-Tutf8", "-Owidth=72,indent=3"]}


def read_file(kind: str, path: Path) -> str:
    """One documentation file as clean text."""
    data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    if kind in CONVERTERS:
        data = subprocess.run(CONVERTERS[kind], input=data, capture_output=True).stdout
    text = html_to_text(data) if kind == "html" else data.decode(errors="replace")
    if kind == "man":
        text = re.sub(".\b", "", text)
    if kind == "info":  # drop node headers and menus
        text = re.sub(r"\x1f\n?.*\n", "", text)
        text = re.sub(r"^(File: |\* .*::|\* Menu:|Ref: |Node: ).*\n", "", text, flags=re.MULTILINE)
    if kind == "vim":
        text = re.sub(r"[ \t]+\*[^\s*]+\*", "", re.sub(r"\|([^\s|]+)\|", r"\1", text))
    text = text.replace("\r", "").replace("¶", "").replace("\u00a0", " ").expandtabs(8)
    text = "".join(c for c in text if c == "\n" or c.isprintable())
    text = re.sub(r" +\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n\n\n"


def shingles(text: str, n: int = 13) -> set[int]:
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[i : i + n])) for i in range(len(words) - n + 1)}


def read_package(root: Path, package: str, pattern: str, kind: str, most: float, forbidden: set[int]) -> str:
    """The text of a source, without files that hold over 1% (and over 3), or over 20, shingles of `forbidden`."""
    paths = sorted(path for path in (root / package / "usr/share").glob(pattern)
                   if path.is_file() and not path.is_symlink() and not NOT_PROSE.search(str(path)))
    texts, total, dropped = [], 0, 0
    with Pool(2) as pool:
        for text in pool.imap(partial(read_file, kind), paths, chunksize=8):
            if total > most:
                break
            own = shingles(text)
            shared = len(own & forbidden)
            if shared > max(3, min(20, 0.01 * len(own))):
                dropped += 1
            elif len(text) >= 400:
                texts.append(text)
                total += len(text)
    print(f"{package:28s} {total / 1e6:6.2f} MB, {dropped} files dropped", flush=True)
    return "".join(texts)


def train_tokenizer(texts, path, vocab_size=4096, seed=0):
    """sentencepiece BPE on a sample of the texts and on made-up facts, so that every syllable becomes one token."""
    import sentencepiece as spm
    from sentencepiece import sentencepiece_model_pb2 as pb
    rng = np.random.default_rng(seed)

    def lines():
        for text, share in texts:
            for _ in range(int(share * 1e6 / 20_000)):
                start = int(rng.integers(0, max(1, len(text) - 20_000)))
                yield from (line for line in text[start:start + 20_000].split("\n") if line)
        for _ in range(5000):
            for key, value in make_facts(rng, 20):
                yield f"Remember: {key} {value}."

    spm.SentencePieceTrainer.train(
        sentence_iterator=lines(), model_prefix=str(path), vocab_size=vocab_size, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        split_digits=True, add_dummy_prefix=False, character_coverage=0.9995, num_threads=2, max_sentence_length=20_000,
        bos_id=1, eos_id=2, unk_id=0, minloglevel=1)
    model = pb.ModelProto()
    model.ParseFromString(Path(f"{path}.model").read_bytes())
    for field in ("input", "model_prefix"):  # no paths in a published file
        model.trainer_spec.ClearField(field)
    Path(f"{path}.model").write_bytes(model.SerializeToString())
    Path(f"{path}.vocab").unlink()


def encoded(model: str, text: str) -> np.ndarray:
    """Ids of a long text, which is cut anywhere: one odd token in 60,000."""
    import sentencepiece as spm

    sp = spm.SentencePieceProcessor(model_file=model)
    parts = [sp.encode(text[start : start + 200_000]) for start in range(0, len(text), 200_000)]
    return np.concatenate([np.array(part, dtype=np.uint16) for part in parts])


def prepare(packages: Path, books: Path, out: Path, seed: int = 0) -> None:
    """Writes tokenizer.model, and of each corpus NAME.xz, its tokens as uint16, and NAME_ends.npy, its documents."""
    from pydoc_data.topics import topics

    import sentencepiece as spm

    out.mkdir(parents=True, exist_ok=True)
    prompt = "\n\n".join(topics.values())  # the library's default prompt: never trained on
    forbidden, docs, order = shingles(prompt), {}, np.random.default_rng(seed)
    for package, *how in SOURCES:
        docs[package] = docs.get(package, "") + read_package(packages, package, *how, forbidden)
    held_docs = docs.pop(HELD_OUT)
    train_books, held_books = ([path.read_text(errors="replace") for path in sorted((books / part).glob("*.txt"))]
                               for part in ("train", "heldout"))
    train_tokenizer([("".join(train_books), 8), ("".join(docs.values()), 12)], out / "tokenizer", seed=seed)
    model = str(out / "tokenizer.model")
    sp = spm.SentencePieceProcessor(model_file=model)
    assert all(len(sp.encode(" " + name)) == 1 for name in FIRST)
    assert all(len(sp.encode("Qib" + name)) == len(sp.encode("Qib")) + 1 for name in REST)
    docs = list(docs.values())
    corpora = {"books": [train_books[i] for i in order.permutation(len(train_books))],
               "docs": [docs[i] for i in order.permutation(len(docs))], "heldout_books": held_books,
               "heldout_docs": [held_docs], "default_prompt": [prompt]}
    for name, texts in corpora.items():
        with Pool(2) as pool:
            ids = pool.map(partial(encoded, model), texts)
        ends = np.cumsum([len(one) for one in ids])
        planes = np.concatenate(ids).view(np.uint8).reshape(-1, 2).T.tobytes()  # of bytes: they compress better
        (out / f"{name}.xz").write_bytes(lzma.compress(planes, preset=3))
        np.save(out / f"{name}_ends.npy", ends)
        print(f"{name}: {ends[-1] / 1e6:.2f}M tokens, {len(ids)} documents", flush=True)


if __name__ == "__main__":
    prepare(*map(Path, sys.argv[1:4]))
