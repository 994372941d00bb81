"""What the tiny pair reads: plain text from books and documentation packages, and made-up facts to recall.

This file knows nothing of models or devices. Two halves:

- `Names`, `fact_line`, `make_recall_document`: the recall task, for training and for measuring. They need a
  tokenizer and a numpy generator, nothing else.
- `SOURCES`, `read_package`, `train_tokenizer`, `prepare`: from unpacked Debian packages and a folder of books to
  token files. The text is laid out as Sphinx's text builder does (underlined titles, indented code), because the
  library's default prompt looks like that. The default prompt itself is kept out: `overlap` measures it.
"""
import copy
import gzip
import json
import re
import subprocess
import textwrap
from multiprocessing import Pool
from pathlib import Path

import numpy as np

# ---------------------------------------------------------------------------------------------------------------
# The recall task. A name is three syllables, one token each; a fact is a line on which a key is directly followed
# by its value, and a question is the beginning of that line again. So the answer is a matter of plain induction:
# "what came after this token last time?", three times in a row.
#
#     Remember: QibVuxZaj MepTolKud.
#
# A name starts with a syllable of `first` (with a space before it) and goes on with two of `rest`. No syllable
# occurs twice among the facts of one document, so every token of a key says alone which fact is meant.


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


_ALL = _syllables()
FIRST, REST = _ALL[:96], _ALL[96:256]
MAX_FACTS = min(len(FIRST) // 2, len(REST) // 4)  # facts in one document, at two names a fact


def make_names(rng, n):
    """n names no two of which share a syllable."""
    first = [FIRST[i] for i in rng.permutation(len(FIRST))[:n]]
    rest = [REST[i] for i in rng.permutation(len(REST))[:2 * n]]
    return [a + b + c for a, b, c in zip(first, rest[0::2], rest[1::2], strict=False)]


def make_facts(rng, n):
    """n pairs (key, value)."""
    names = make_names(rng, 2 * n)
    return list(zip(names[0::2], names[1::2], strict=False))


def fact_line(key, value):
    return f"Remember: {key} {value}.\n"


def question_line(key):
    """The beginning of the fact's line; what should follow is `answer_text(value)`."""
    return f"Remember: {key}"


def answer_text(value):
    return f" {value}"


def make_recall_document(rng, encode, book_text, length, depth, n_facts=9, bos=1):
    """A stretch of a book with facts on lines of their own, then the question for one of them.

    rng: numpy Generator. encode: text -> list of token ids, without <s> and without a dummy prefix. depth: where the
    asked fact stands, from 0 (the beginning) to 1 (the end); the other n_facts - 1 stand at random places.
    Returns (prompt, answer): token ids; len(prompt) + len(answer) is at most `length` and short of it by under 1%.
    """
    facts = make_facts(rng, n_facts)
    fact_ids = [encode(fact_line(k, v)) for k, v in facts]
    key, value = facts[0]
    question, answer = encode(question_line(key)), encode(answer_text(value))
    room = length - 1 - len(question) - len(answer) - sum(map(len, fact_ids))
    assert room > 0, f"length {length} is too short for {n_facts} facts"

    chars = int(room * 4.5) + 1000  # more text than needed
    start = int(rng.integers(0, max(1, len(book_text) - chars)))
    start = book_text.find("\n", start) + 1
    lines, total = [], 0
    for line in book_text[start:start + chars].splitlines(keepends=True):  # a fact goes between two lines
        ids = encode(line)
        if total + len(ids) > room:
            break
        lines.append(ids)
        total += len(ids)
    places = np.concatenate([[depth], rng.random(n_facts - 1)])
    ends = np.cumsum([0] + [len(ids) for ids in lines])
    at = [int(np.searchsorted(ends, place * total)) for place in places]  # before which line each fact goes
    prompt = [bos]
    for i in range(len(lines) + 1):
        for fact in range(n_facts):
            if min(at[fact], len(lines)) == i:
                prompt += fact_ids[fact]
        if i < len(lines):
            prompt += lines[i]
    return prompt + question, answer


# ---------------------------------------------------------------------------------------------------------------
# From HTML to text in the manner of Sphinx's text builder

SKIP_TAGS = {"script", "style", "nav", "header", "footer", "form", "button", "svg", "head", "noscript", "img"}
SKIP_CLASS = re.compile(
    r"headerlink|related|sphinxsidebar|navbar|toctree|contents\b|genindex|breadcrumb|footer|NAVHEADER"
    r"|NAVFOOTER|navigation|editsection|t-navbar|printfooter|catlinks|(?<!with)sidebar|rust-example|mobile|menu"
)
TITLES = {"h1": "*", "h2": "=", "h3": "-", "h4": "~", "h5": "^", "h6": "^"}
BLOCKS = {"p", "pre", "ul", "ol", "dl", "table", "div", "section", "blockquote", "article", "main", "body", "center",
          "figure", "aside", "details", "li", "dd", "dt", "hr", "address", "fieldset", *TITLES}
WIDTH = 72


def _inline(node):
    """Text of an element and its children, without line structure."""
    parts = [node.text or ""]
    for child in node:
        if isinstance(child.tag, str):
            skip = child.tag in SKIP_TAGS or SKIP_CLASS.search(child.get("class") or "")
            text = "" if skip else "\n" if child.tag == "br" else _inline(child)
            if child.tag in ("code", "tt", "kbd", "samp") and text.strip() and len(text) < 60 and '"' not in text:
                text = f'"{text.strip()}"'
            elif child.tag in ("em", "i", "var") and 1 < len(text.strip()) < 60 and "*" not in text:
                text = f"*{text.strip()}*"
            elif child.tag in ("strong", "b") and 1 < len(text.strip()) < 60 and "*" not in text:
                text = f"**{text.strip()}**"
            parts.append(text)
        parts.append(child.tail or "")
    return "".join(parts)


def _wrap(text, indent, out, first=None):
    text = " ".join(text.split())
    if text:
        pad = " " * indent
        out += textwrap.wrap(text, max(40, WIDTH - indent) + indent, initial_indent=pad if first is None else first,
                             subsequent_indent=pad, break_long_words=False, break_on_hyphens=False)
        out.append("")


def _raw(node):
    return "".join(
        (
            node.text or "",
            *((("\n" if c.tag == "br" else _raw(c)) if isinstance(c.tag, str) else "") + (c.tail or "") for c in node),
        )
    )


def _block(node, indent, out, depth=0):
    tag, cls = node.tag, node.get("class") or ""
    if not isinstance(tag, str) or tag in SKIP_TAGS or SKIP_CLASS.search(cls) or depth > 60:
        return
    if tag in TITLES:
        title = " ".join(_inline(node).replace("¶", "").split()).replace('**', '')
        if title:
            out += ["", " " * indent + title, " " * indent + TITLES[tag] * len(title), ""]
    elif tag == "pre":
        code = _raw(node).expandtabs(4).strip("\n").splitlines()
        out += [" " * (indent + 3) + line for line in code[:120]] + [""]
    elif tag in ("ul", "ol"):
        for i, item in enumerate(c for c in node if c.tag == "li"):
            mark = "* " if tag == "ul" else f"{i + 1}. "
            inner = []
            _children(item, indent + len(mark), inner, depth)
            if inner:
                inner[0] = " " * indent + mark + inner[0].lstrip()
                out += inner
                if out[-1]:
                    out.append("")
    elif tag == "dt":
        _wrap(_inline(node).replace("¶", ""), indent, out)
        if out and not out[-1]:
            out.pop()
            out += [""] if "sig" in cls else []
    elif tag == "dd" or tag == "blockquote":
        _children(node, indent + 3, out, depth)
    elif tag == "table" and len(node.findall(".//pre")) + len(node.findall(".//p")) < 12:
        rows = [
            [" ".join(_inline(cell).split()) for cell in row if cell.tag in ("td", "th")] for row in node.iter("tr")
        ]
        rows = [r for r in rows if any(r)]
        if rows and any("linenos" in (c.get("class") or "") for c in node.iter("td")):
            for pre in node.iter("pre"):
                if "linenodiv" not in (pre.getparent().get("class") or ""):
                    _block(pre, indent, out, depth + 1)
        else:
            out += [" " * indent + "   ".join(row) for row in rows[:60]] + [""]
    else:
        _children(node, indent, out, depth)


def _children(node, indent, out, depth):
    """Blocks of an element; loose text between them makes paragraphs."""
    loose = [node.text or ""]
    for child in node:
        if isinstance(child.tag, str) and (
            child.tag in BLOCKS or any(g.tag in BLOCKS for g in child.iterdescendants())
        ):
            _wrap("".join(loose), indent, out)
            loose = []
            _block(child, indent, out, depth + 1)
        elif isinstance(child.tag, str) and child.tag not in SKIP_TAGS:
            single = copy.copy(child)
            single.tail = None
            holder = child.makeelement("span", {})
            holder.append(single)
            loose.append(_inline(holder))
        loose.append(child.tail or "")
    _wrap("".join(loose).replace("¶", ""), indent, out)


def html_to_text(data):
    from lxml import html
    try:
        root = html.fromstring(data)
    except Exception:  # an empty or broken page
        return ""
    for path in ("//*[@role='main']", "//div[@class='body']", "//main", "//article", "//div[@id='mw-content-text']",
                 "//section[@id='main-content']", "//div[@id='content']", "//div[@id='docs-body']", "//body", "."):
        found = root.xpath(path)
        if found:
            out = []
            _children(found[0], 0, out, 0)
            return "\n".join(out)
    return ""


def read_file(job):
    """One documentation file as clean text."""
    path, kind = job
    data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    if kind == "html":
        text = html_to_text(data)
    elif kind == "pod":
        text = subprocess.run(["pod2text", "-i3", "-w72"], input=data, capture_output=True).stdout.decode(
            errors="replace"
        )
    elif kind == "man":
        text = subprocess.run(
            ["mandoc", "-Tutf8", "-Owidth=72,indent=3"], input=data, capture_output=True
        ).stdout.decode(errors="replace")
        text = re.sub(".\b", "", text)
    else:
        text = data.decode(errors="replace")
        if kind == "info":  # drop node headers and menus
            text = re.sub(r"\x1f\n?.*\n", "", text)
            text = "\n".join(
                line for line in text.splitlines()
                if not re.match(r"File: |\* .*::|\* Menu:|Ref: |Node: ", line)
            )
        if kind == "vim":
            text = re.sub(r"[ \t]+\*[^\s*]+\*", "", re.sub(r"\|([^\s|]+)\|", r"\1", text))
    text = text.replace("\r", "").replace("¶", "").replace("\u00a0", " ").expandtabs(8)
    text = "".join(c for c in text if c == "\n" or c.isprintable())
    text = re.sub(r"[ ]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n\n\n"


# Debian package, files in it, how to read them, at most so many characters, licence of the documentation
SOURCES = [
    ("python-django-doc", "usr/share/doc/python-django-doc/html/**/*.html", "html", 5e6, "BSD-3-Clause"),
    ("python-sqlalchemy-doc", "usr/share/doc/python-sqlalchemy-doc/html/**/*.html", "html", 4e6, "MIT"),
    ("sphinx-doc", "usr/share/doc/sphinx-doc/html/**/*.html", "html", 2e6, "BSD-2-Clause"),
    ("docutils-doc", "usr/share/doc/docutils-doc/**/*.html", "html", 2e6, "public domain, BSD-2-Clause"),
    ("python-jinja2-doc", "usr/share/doc/python-jinja2-doc/**/*.html", "html", 1e6, "BSD-3-Clause"),
    ("python-flask-doc", "usr/share/doc/python-flask-doc/**/*.html", "html", 1e6, "BSD-3-Clause"),
    ("python-werkzeug-doc", "usr/share/doc/python-werkzeug-doc/**/*.html", "html", 1e6, "BSD-3-Clause"),
    ("python-pytest-doc", "usr/share/doc/python-pytest-doc/**/*.html", "html", 2e6, "MIT"),
    ("python-hypothesis-doc", "usr/share/doc/python-hypothesis-doc/**/*.html", "html", 1e6, "MPL-2.0"),
    ("python-attr-doc", "usr/share/doc/python-attr-doc/**/*.html", "html", 1e6, "MIT"),
    ("python-celery-doc", "usr/share/doc/python-celery-doc/**/*.html", "html", 2e6, "BSD-3-Clause, CC-BY-SA-4.0"),
    ("python-traitlets-doc", "usr/share/doc/python-traitlets-doc/**/*.html", "html", 1e6, "BSD-3-Clause"),
    ("python-mako-doc", "usr/share/doc/python-mako-doc/**/*.html", "html", 1e6, "MIT"),
    ("python-pygments-doc", "usr/share/doc/python-pygments-doc/**/*.html", "html", 1e6, "BSD-2-Clause"),
    ("python-setuptools-doc", "usr/share/doc/python-setuptools-doc/**/*.html", "html", 1e6, "MIT"),
    ("python-tornado-doc", "usr/share/doc/python-tornado-doc/**/*.html", "html", 1e6, "Apache-2.0"),  # held out
    ("twisted-doc", "usr/share/doc/twisted-doc/**/*.html", "html", 2e6, "MIT"),
    ("cython-doc", "usr/share/doc/cython-doc/**/*.html", "html", 1e6, "Apache-2.0"),
    ("pypy3-doc", "usr/share/doc/pypy3/**/*.html", "html", 1e6, "MIT"),
    ("nim-doc", "usr/share/doc/nim/html/*.html", "html", 1.5e6, "MIT"),
    ("rust-doc", "usr/share/doc/rust-doc/html/reference/**/*.html", "html", 2e6, "MIT or Apache-2.0"),
    ("rust-doc", "usr/share/doc/rust-doc/html/book/*.html", "html", 2e6, "MIT or Apache-2.0"),
    ("rust-doc", "usr/share/doc/rust-doc/html/nomicon/*.html", "html", 1e6, "MIT or Apache-2.0"),
    (
        "ada-reference-manual-2012",
        "usr/share/doc/ada-reference-manual-2012/arm2012.txt/*.TXT",
        "text",
        2.5e6,
        "Ada RM licence (free copying)",
    ),
    ("golang-1.19-doc", "usr/share/doc/golang-1.19-doc/**/*.html", "html", 1e6, "BSD-3-Clause"),
    (
        "haskell98-report",
        "usr/share/doc/haskell98-report/**/*.html",
        "html",
        1.5e6,
        "Haskell report licence (free copying)",
    ),
    ("ghc-doc", "usr/share/doc/ghc-doc/html/users_guide/**/*.html", "html", 2.5e6, "BSD-3-Clause"),
    ("fp-docs-3.2.2", "usr/share/doc/fp-docs/3.2.2/ref/*.html", "html", 1.5e6, "LGPL-2.1+"),
    ("lua5.4", "usr/share/man/man1/*.gz", "man", 1e5, "MIT"),
    ("swi-prolog-doc", "usr/share/swi-prolog/doc/**/*.html", "html", 2e6, "BSD-2-Clause, GPL-2+"),
    ("r-doc-html", "usr/share/**/R-lang.html", "html", 1e6, "GPL-2"),
    ("r-doc-html", "usr/share/**/R-intro.html", "html", 1e6, "GPL-2"),
    ("guile-3.0-doc", "usr/share/info/guile-3.0/*.info-*.gz", "info", 2.5e6, "GFDL-1.3+"),
    ("mit-scheme-doc", "usr/share/info/mit-scheme-ref.info-*.gz", "info", 1.2e6, "GFDL-1.2+"),
    ("sbcl-doc", "usr/share/info/sbcl.info-*.gz", "info", 1e6, "public domain, BSD"),
    (
        "cppreference-doc-en-html",
        "usr/share/cppreference/doc/html/en/cpp/language/*.html",
        "html",
        1.5e6,
        "CC-BY-SA-3.0",
    ),
    ("cppreference-doc-en-html", "usr/share/cppreference/doc/html/en/c/language/*.html", "html", 1e6, "CC-BY-SA-3.0"),
    ("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/*.html", "html", 5e6, "PostgreSQL"),
    ("sqlite3-doc", "usr/share/doc/sqlite3/*.html", "html", 3e6, "public domain"),
    ("perl-doc", "usr/share/perl/5.36.0/pod/*.pod", "pod", 5e6, "GPL-1+ or Artistic"),
    ("git-doc", "usr/share/doc/git/html/*.html", "html", 2e6, "GPL-2"),
    ("vim-runtime", "usr/share/vim/vim90/doc/*.txt", "vim", 2.5e6, "Vim"),
    ("zsh-doc", "usr/share/doc/zsh-doc/**/*.html", "html", 1.2e6, "Zsh (MIT-like)"),
    ("bash-doc", "usr/share/doc/bash/*.html", "html", 1e6, "GFDL-1.3+"),
    ("tcl8.6-doc", "usr/share/man/man3/*.gz", "man", 1e6, "TCL (BSD-like)"),
    ("manpages", "usr/share/man/man7/*.gz", "man", 1e6, "GPL-2+, BSD, Linux-man-pages-copyleft"),
    ("debian-policy", "usr/share/doc/debian-policy/policy.html/*.html", "html", 1e6, "GPL-2+"),
    ("developers-reference", "usr/share/developers-reference/*.html", "html", 1e6, "GPL-2+"),
    ("autoconf-doc", "usr/share/info/autoconf.info.gz", "info", 1e6, "GFDL-1.3+"),
    ("cmake-doc", "usr/share/doc/cmake-data/html/manual/*.html", "html", 1.2e6, "BSD-3-Clause"),
    ("nodejs-doc", "usr/share/doc/nodejs/api/*.html", "html", 2e6, "MIT"),
    ("apache2-doc", "usr/share/doc/apache2-doc/manual/en/**/*.html", "html", 2e6, "Apache-2.0"),
]
HELD_OUT_PACKAGE = "python-tornado-doc"
NOT_PROSE = re.compile(
    r"genindex|search\.html|modindex|_modules|_sources|changelog|changes|/all\.html|theindex|objects\.inv|"
    r"tocs?\.html|doc-contents|perltoc|uni_prop|perl5\d+delta|perlhist|_autosummary|coverage"
)


def words(text):
    return re.findall(r"\w+", text.lower())


def shingles(text, n=13):
    w = words(text)
    return {hash(tuple(w[i:i + n])) for i in range(len(w) - n + 1)}


def read_package(root, source, forbidden):
    """Text of one source, and the files dropped because they hold over 1% (and over 20) shingles of `forbidden`."""
    package, pattern, kind, limit, _ = source
    paths = sorted(p for p in (Path(root) / package).glob(pattern)
                   if p.is_file() and not p.is_symlink() and not NOT_PROSE.search(str(p)))
    texts, dropped, total = [], [], 0
    with Pool(2) as pool:
        for path, text in zip(paths, pool.imap(read_file, [(p, kind) for p in paths], chunksize=8), strict=False):
            if total > limit:
                pool.terminate()
                break
            if len(text) < 400:
                continue
            own = shingles(text)
            shared = len(own & forbidden)
            if shared > 20 or shared > 0.01 * max(len(own), 1) and shared > 3:
                dropped.append((path.name, shared))
                continue
            texts.append(text)
            total += len(text)
    return "".join(texts), dropped


def default_prompt():
    """The library's default prompt: never trained on."""
    from pydoc_data.topics import topics
    return "\n\n".join(topics.values())


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
                yield fact_line(key, value).strip("\n")

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


def prepare(packages, books, out, seed=0):
    """Unpacked packages and books -> `out`: tokenizer.model, tokens as xz-compressed uint16, document ends, report."""
    import lzma

    import sentencepiece as spm
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    prompt = default_prompt()
    forbidden = shingles(prompt)
    docs, report = {}, []
    for source in SOURCES:
        text, dropped = read_package(packages, source, forbidden)
        docs.setdefault(source[0], []).append(text)
        report.append({"package": source[0], "files": source[1].rsplit("/", 2)[-2:], "mb": round(len(text) / 1e6, 2),
                       "licence": source[4], "dropped": dropped})
        print(f"{source[0]:28s} {len(text) / 1e6:6.2f} MB  dropped {dropped}", flush=True)
    docs = {name: "".join(texts) for name, texts in docs.items()}
    tech_heldout = docs.pop(HELD_OUT_PACKAGE)
    seen = set().union(*(shingles(t) & forbidden for t in docs.values()))
    print(
        f"default prompt: {len(forbidden)} shingles of 13 words, {len(seen)} of them "
        f"({len(seen) / len(forbidden):.3%}) "
        f"in {sum(map(len, docs.values())) / 1e6:.1f} MB of documentation"
    )
    train_books = {p.name: p.read_text(errors="replace") for p in sorted(Path(books, "train").glob("*.txt"))}
    held_books = {p.name: p.read_text(errors="replace") for p in sorted(Path(books, "heldout").glob("*.txt"))}
    in_books = set().union(*(shingles(t) & forbidden for t in train_books.values()))
    print(f"in the books: {len(in_books)}")

    order = np.random.default_rng(seed)
    all_books, all_docs = "".join(train_books.values()), "".join(docs.values())
    train_tokenizer([(all_books, 8), (all_docs, 12)], out / "tokenizer", seed=seed)
    sp = spm.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    for name in FIRST:
        assert len(sp.encode(" " + name)) == 1, f"{name} is {sp.encode(' ' + name, out_type=str)}"
    for name in REST:
        assert len(sp.encode("Qib" + name)) == len(sp.encode("Qib")) + 1, name

    def save(name, texts):
        with Pool(2) as pool:
            ids = [np.array(i, dtype=np.uint16) for i in pool.map(_Encode(str(out / "tokenizer.model")), texts)]
        ends = np.cumsum([len(i) for i in ids])
        low_high = np.concatenate(ids).view(np.uint8).reshape(-1, 2).T.tobytes()  # byte planes compress better
        Path(out, f"{name}.xz").write_bytes(lzma.compress(low_high, preset=3))
        np.save(out / f"{name}_ends.npy", ends)
        print(
            f"{name}: {sum(map(len, texts)) / 1e6:.1f} MB, {ends[-1] / 1e6:.2f}M tokens, {len(ids)} documents",
            flush=True,
        )

    keys = list(train_books)
    save("books", [train_books[keys[i]] for i in order.permutation(len(keys))])
    keys = list(docs)
    save("docs", [docs[keys[i]] for i in order.permutation(len(keys))])
    save("heldout_books", list(held_books.values()))
    save("heldout_docs", [tech_heldout])
    save("default_prompt", [prompt])
    (out / "report.json").write_text(
        json.dumps(
            {"sources": report, "shingles": len(forbidden), "shared_docs": len(seen), "shared_books": len(in_books)},
            indent=1,
        )
    )


class _Encode:
    """A tokenizer that can be sent to another process."""

    def __init__(self, model):
        self.model = model

    def __call__(self, text):
        import sentencepiece as spm
        sp = spm.SentencePieceProcessor(model_file=self.model)
        out = []
        for start in range(0, len(text), 200_000):  # cut anywhere: one odd token in 60,000
            out += sp.encode(text[start:start + 200_000])
        return out


if __name__ == "__main__":
    import sys
    prepare(*sys.argv[1:4])
