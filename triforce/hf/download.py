"""Fetches what this library needs of a Hugging Face repository: config, tokenizer and one set of weights.

It knows nothing of the model. Of the weights it takes safetensors where they exist, else .bin; everything else that a
repository may hold (original/, .pth, .gguf, .onnx, other precisions, code) stays where it is.
"""

import argparse
import errno
import glob
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from ..errors import UserError
from .folders import REPO_ID, UNFINISHED

WEIGHTS = {r"model\.safetensors": None, r"model-\d+-of-\d+\.safetensors": "model.safetensors.index.json",
           r"pytorch_model\.bin": None, r"pytorch_model-\d+-of-\d+\.bin": "pytorch_model.bin.index.json"}
TEXTS = re.compile(r"tokenizer\.model|[^/]*\.json|(additional_chat_templates/)?[^/]*\.jinja|merges\.txt|vocab\.txt"
                   r"|LICENSE[^/]*|USE_POLICY[^/]*")
AGAIN = "run the same command again: files that are whole are not fetched twice"


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

    folder, token = target(repo_id, out_dir), (token or "").strip() or None
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise UserError("the token holds a space, a line end or a letter that no token has; copy it again")
    api = HfApi(endpoint=endpoint, token=token)
    try:
        about = api.model_info(repo_id, revision=revision, files_metadata=True)
        listing = {file.rfilename: file.size for file in about.siblings}
        files = needed(listing)
        if not files:
            raise UserError(f"{repo_id} has no weights in safetensors or .bin ({len(listing)} other files); "
                            "choose a repository in the Hugging Face layout")
        folder.mkdir(parents=True, exist_ok=True)
        remove_parts(folder)
        present = sum((folder / file).stat().st_size for file in files if (folder / file).exists())
        size, free = sum(listing[file] or 0 for file in files) - present, shutil.disk_usage(folder).free
        if size > free:
            raise UserError(f"{repo_id} needs {size / 1e9:.1f} GB more, and {folder} has {free / 1e9:.1f} GB free; "
                            "make room, or choose another disk with --out-dir")
        (folder / UNFINISHED).write_text(repo_id + "\n", encoding="utf-8")
        # The client takes names for patterns.
        api.snapshot_download(repo_id, revision=about.sha or revision, local_dir=folder,
                              allow_patterns=[glob.escape(file) for file in files])
        for file in files:  # without a network the client gives back a folder as it is
            if not (folder / file).is_file() or listing[file] not in (None, (folder / file).stat().st_size):
                raise UserError(f"{file} of {repo_id} did not come whole; {AGAIN}")
        (folder / UNFINISHED).unlink()
    except UserError:
        raise
    except Exception as error:  # the client's errors come from several libraries and change with its version
        raise explain(error, repo_id, revision, folder) from error
    return folder


def target(repo_id: str, out_dir: str | Path | None) -> Path:
    """The folder of a download."""
    if not REPO_ID.fullmatch(repo_id):
        raise UserError(f"--repo-id {repo_id!r} is not of the form owner/name, of letters, digits, '_', '-' and '.'; a "
                        "folder on this machine needs no download: give it to --checkpoint")
    return Path(out_dir) if out_dir else Path("checkpoints") / repo_id


def remove_parts(folder: Path) -> None:
    """Removes what an interrupted client left: parts of files, which it never goes on with."""
    for path in (folder / ".cache/huggingface/download").rglob("*.incomplete"):
        path.unlink(missing_ok=True)


def explain(error: Exception, repo_id: str, revision: str | None, folder: Path) -> UserError:
    """What a failed download means for the one who asked for it, in one line."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    numbers, cause = set(), error
    while cause is not None:
        numbers.add(getattr(cause, "errno", None))
        cause = cause.__cause__ or cause.__context__
    reason = re.sub(r"Bearer .*|hf_\w+", "...", (str(error).strip() or type(error).__name__).splitlines()[0])
    absent = isinstance(error, errors.RepositoryNotFoundError)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        text = f"{repo_id} is gated: accept its terms on its model page, then give your token with HF_TOKEN"
    elif status == 401 and not absent:
        text = f"the hub rejects the token for {repo_id} (401); give a valid one with HF_TOKEN, or log in again"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{repo_id} has no revision {revision!r}; leave out --revision, or check its spelling"
    elif absent or status == 404:
        text = (f"{repo_id} does not exist on the hub, or is private ({status}); check the spelling, or give a token "
                "that may see it with HF_TOKEN")
    elif numbers & {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}:
        text = f"cannot write to {folder} ({reason}); make room, or choose another folder with --out-dir, and {AGAIN}"
    elif status is not None:
        text = f"the hub answers {status} for {repo_id} ({reason}); try again later"
    else:
        text = f"cannot reach the hub for {repo_id} ({reason}); check the network, then {AGAIN}"
    return UserError(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="triforce download", description="Downloads a checkpoint from the hub.")
    parser.add_argument("--repo-id", "--repo_id", required=True, help="owner/name")
    parser.add_argument("--out-dir", "--out_dir", help="default: checkpoints/<repo-id>")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--token", "--hf-token", "--hf_token", help="of your account. Better by HF_TOKEN or "
                        "a login (hf auth login): others on this machine can see what a command is given")
    args = parser.parse_args(argv)

    def interrupted(*_):
        remove_parts(target(args.repo_id, args.out_dir))
        print(f"\ninterrupted; {AGAIN}", file=sys.stderr, flush=True)
        os._exit(130)  # the client's threads would first fetch what they have begun

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        folder = download(args.repo_id, args.out_dir, args.revision, args.token)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, before)
    print(f"{folder} is complete. Next:\n\n    triforce --checkpoint {folder if args.out_dir else args.repo_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
