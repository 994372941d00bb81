"""Hugging Face folders by name: where a checkpoint lies, and which files have its weights. Reads no tensor.

PyTorch is not imported here: `cli/request.py` needs this before it is.
"""

import re
from pathlib import Path

from ..errors import UserError
from .files import guarded, read_json, read_text, shown

TINY = Path(__file__).parents[1] / "tiny"  # the embedded pair: target/ and draft/
REPO_ID = re.compile(r"(?a:[A-Za-z0-9][\w.-]{0,95}/\w[\w.-]{0,95})")
UNFINISHED = ".unfinished-download"  # is in a folder until its download has ended
LOADED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
          "*.jinja")  # files beside the weights, as patterns
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")  # each has a sharded twin, named by NAME.index.json


def resolve(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint: `tiny`, an existing folder, or a repository id that was downloaded before.

    A repository id is looked for under `checkpoints/` of the working directory, then in the Hugging Face cache.

    Raises:
        UserError: nothing is there; for a repository id the text holds the command that downloads it.
    """
    if checkpoint == "tiny":
        return TINY / "target"
    if not isinstance(checkpoint, (str, Path)):
        raise UserError(f"checkpoint ({checkpoint!r}) must be a folder or repository id; numbers are max_new_tokens=")
    with guarded(f"{shown(checkpoint)} cannot be opened"):  # a name that is too long, an unknown user
        path = Path(checkpoint).expanduser()
        if path.is_dir() and checkpoint != "":
            return finished(path)
    if isinstance(checkpoint, Path) or not REPO_ID.fullmatch(checkpoint):
        raise UserError(f"no such folder: {checkpoint}; give a folder, a repository id (owner/name) or 'tiny'")
    local = Path("checkpoints") / checkpoint
    if found := finished(local) if local.is_dir() else find_cached(checkpoint):
        return found
    raise UserError(f"{checkpoint} is not on this machine; download it: triforce download --repo-id {checkpoint}")


def finished(folder: Path) -> Path:
    """A folder in which no download was broken off."""
    if (folder / UNFINISHED).exists():
        raise UserError(f"the download into {folder} was not finished; run it again: triforce download --repo-id "
                        f"{read_text(folder / UNFINISHED).strip()} --out-dir {folder}")
    return folder


def find_cached(repo_id: str) -> Path | None:
    """The folder of a repository in the Hugging Face cache, unless the cache knows of a file that did not come."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True, allow_patterns=list(LOADED)))
        find_weights(folder)
    except (errors.LocalEntryNotFoundError, UserError):
        return None
    return folder if (folder / "config.json").exists() else None


def find_draft(checkpoint: str | Path, draft) -> Path | None:
    """The folder of the draft model, if one is to draft."""
    if draft == "ngram" or draft is False or callable(draft):
        return None
    if draft is None or draft is True:
        return TINY / "draft" if checkpoint == "tiny" else None
    if not isinstance(draft, (str, Path)):
        raise UserError(f"draft ({draft!r}) must be a folder, a repository id, 'ngram', False, or a maker of a Drafter")
    return resolve(draft)


def find_weights(folder: Path) -> list[Path]:
    """The weight files of a folder, safetensors before .bin.

    Raises:
        UserError: it has none, or an index names a file that is absent, or outside of the folder.
    """
    for name in SINGLE_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return [folder / name]
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise UserError(f"{index} has no weight_map; download it again")
            for file in weight_map.values():
                inside = isinstance(file, str) and Path(file).name == file
                if not (inside and (folder / file).is_file()):
                    raise UserError(f"{index} names {shown(file)}, which is no file of this folder; download it again")
            return [folder / file for file in sorted(set(weight_map.values()))]
    raise UserError(f"{folder} has neither {' nor '.join(SINGLE_FILES)} (nor their index); download it again")
