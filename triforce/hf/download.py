"""Fetches what this library needs of a Hugging Face repository: config, tokenizer and one set of weights.

Of the weights it takes safetensors where they exist, else .bin; what else a repository may hold stays where it is.
"""

import glob
import os
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from ..errors import Parser, UserError
from .files import one_line
from .folders import REPO_ID, UNFINISHED

WEIGHTS = {r"model\.safetensors": None, r"model-\d+-of-\d+\.safetensors": "model.safetensors.index.json",
           r"pytorch_model\.bin": None, r"pytorch_model-\d+-of-\d+\.bin": "pytorch_model.bin.index.json"}
TEXTS = re.compile(r"tokenizer\.model|[^/]*\.json|(additional_chat_templates/)?[^/]*\.jinja|merges\.txt|vocab\.txt"
                   r"|LICENSE[^/]*|USE_POLICY[^/]*")
AGAIN = "run the same command again: files that are whole are not fetched twice"
REFUSED = (401, 403, 404)  # by the hub's status
ACCESS = "check the spelling, --revision too; if it is private or gated, accept its terms, and set HF_TOKEN"


def needed(files: Iterable[str]) -> list[str]:
    """The files of a repository that loading it needs, of all that it lists; without weights, an empty list."""
    for pattern, index in WEIGHTS.items():
        if weights := [file for file in files if re.fullmatch(pattern, file)]:
            texts = [file for file in files if TEXTS.fullmatch(file) and not file.endswith(".index.json")]
            return sorted(texts) + sorted(weights) + [file for file in files if file == index]
    return []


def download(repo_id: str, out_dir: str | Path | None = None, revision: str | None = None, token: str | None = None,
             endpoint: str | None = None) -> Path:
    """Downloads a checkpoint into a folder, with a progress bar. Files that came whole in an earlier try are kept.
    Until all are there, the folder says that it is unfinished, and `resolve` refuses it.

    Args:
        out_dir: None is `checkpoints/<repo_id>`, where `--checkpoint <repo_id>` looks.
        revision: branch, tag or commit. token: None takes HF_TOKEN or what a login left on this machine.
        endpoint: of the hub; None takes HF_ENDPOINT or the public one.

    Raises:
        UserError: no such repository, no access, no network, no room, or no weights in it.
    """
    from huggingface_hub import HfApi

    if not REPO_ID.fullmatch(repo_id):
        raise UserError(f"--repo-id {repo_id!r} is not of the form owner/name; give a folder to --checkpoint")
    folder = Path(out_dir) if out_dir else Path("checkpoints") / repo_id
    api = HfApi(endpoint=endpoint, token=(token or "").strip() or None)
    try:
        about = api.model_info(repo_id, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in about.siblings}
        files = needed(sizes)
        if not files:
            raise UserError(f"{repo_id} has no weights in safetensors or .bin ({len(sizes)} other files); use another")
        folder.mkdir(parents=True, exist_ok=True)
        for part in (folder / ".cache/huggingface/download").rglob("*.incomplete"):
            part.unlink(missing_ok=True)  # of an interrupted client, which never goes on with it
        (folder / UNFINISHED).write_text(repo_id + "\n", encoding="utf-8")
        # The client takes names for patterns.
        api.snapshot_download(repo_id, revision=about.sha or revision, local_dir=folder,
                              allow_patterns=[glob.escape(file) for file in files])
        for file in files:  # without a network the client gives back a folder as it is
            if not (folder / file).is_file() or (folder / file).stat().st_size < sizes[file]:
                raise UserError(f"{file} of {repo_id} did not come whole; {AGAIN}")
        (folder / UNFINISHED).unlink()
    except UserError:
        raise
    except Exception as error:  # the client's errors come from several libraries and change with its version
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = re.sub(r"Bearer .*|hf_\w+", "...", one_line(error))  # without a token
        mend = f"check the network, and the room on the disk of {folder}; then {AGAIN}"
        raise UserError(f"cannot download {repo_id}: {reason}; {mend if status not in REFUSED else ACCESS}") from error
    return folder


def main(argv: list[str] | None = None) -> int:
    """`triforce download`. Raises UserError, which the command line prints."""
    parser = Parser(prog="triforce download", description="Downloads a checkpoint from the hub.")
    parser.add_argument("--repo-id", "--repo_id", required=True, help="owner/name")
    parser.add_argument("--out-dir", "--out_dir", help="default: checkpoints/<repo-id>")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--token", "--hf-token", "--hf_token", help="of your account; better: HF_TOKEN")
    args = parser.parse_args(argv)

    def interrupted(*_):
        print(f"\ninterrupted; {AGAIN}", file=sys.stderr, flush=True)
        os._exit(130)  # the client's threads would first fetch what they have begun

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        folder = download(args.repo_id, args.out_dir, args.revision, args.token)
    finally:
        signal.signal(signal.SIGINT, before)
    print(f"{folder} is complete. Next:\n\n    triforce --checkpoint {folder if args.out_dir else args.repo_id}")
    return 0
