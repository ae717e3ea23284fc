"""Put a checkpoint on the Hugging Face Hub: its weights, config and tokenizer, not what only a resume needs.

    python scripts/push_to_hub.py runs/a/checkpoints/step_000100 me/my-model
    python scripts/push_to_hub.py runs/a/checkpoints/step_000100 me/my-model --revision step-100 --private
    python scripts/push_to_hub.py runs/a me/my-model --all        # every checkpoint of the run, a branch for each

A checkpoint is one commit: it is there completely or not at all, and weights of an earlier one under other names (shards, an
adapter) are removed by the same commit, since a loader would mix the two. The optimizer, random generators and manifest stay
here; a checkpoint that its manifest says is damaged is not sent. A branch that is there already gets a new commit.

It needs a token with write access in HF_TOKEN (or from `hf auth login`). Another hub than huggingface.co: --endpoint or
HF_ENDPOINT; one that knows LFS but not Xet storage needs HF_HUB_DISABLE_XET=1 as well.
"""
# ruff: noqa: T201 - a script prints

import argparse
import fnmatch
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

from ludic.training.checkpoint.manifest import MANIFEST, problem_with
from ludic.training.checkpoint.rank_files import RANKS
from ludic.types import ConfigError, LudicError

NOT_SENT = ("*.pt", RANKS, "trainer_state.json", "base_fingerprint.json", MANIFEST, ".*")
"""Files that only Ludic reads, and only to resume."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
STALE = (*WEIGHTS, "*.index.json", "adapter_config.json")
"""Files by which a loader chooses weights. Left from an earlier checkpoint, they would select its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """One checkpoint to upload to one branch."""

    folder: Path
    files: dict[str, Path]
    """By their names on the hub."""
    revision: str | None
    """None is the repository's main branch."""
    message: str


class Refused(LudicError, RuntimeError):
    """The hub refused or failed; the message says what to do."""


# --- what is sent ---


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """(name on the hub, file) of the model files of a checkpoint."""
    _check(folder)
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(_matches(part, NOT_SENT) for part in path.relative_to(folder).parts)
    }
    if not any(_matches(Path(name).name, WEIGHTS) for name in files):
        there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ConfigError(
            f"{folder} holds no weights (*.safetensors); it holds {there}. Give a checkpoint folder such as "
            "runs/a/checkpoints/step_000100, or a run's folder with --all."
        )
    return files


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Give a checkpoint, such as runs/a/checkpoints/step_000100.")
    problem = problem_with(folder, checksums=True) if (folder / MANIFEST).exists() else None
    if problem is not None:
        raise ConfigError(f"The checkpoint {folder} is damaged: {problem}. Nothing was sent; push another one.")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def tokenizer_files(base_model: str | None) -> Iterator[dict[str, Path]]:
    """The files of another model's tokenizer, for checkpoints that were saved without one."""
    if base_model is None:
        yield {}
        return
    from transformers import AutoTokenizer  # slow to import, and rarely needed

    with tempfile.TemporaryDirectory() as folder:
        try:
            AutoTokenizer.from_pretrained(base_model, trust_remote_code=False).save_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--base-model {base_model!r} gave no tokenizer: {str(error).strip().splitlines()[0]} Give a folder or a "
                "hub id that has one."
            ) from error
        yield {path.name: path for path in sorted(Path(folder).iterdir()) if path.is_file()}


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a run, in the order of their steps."""
    folders = [path for root in (run, run / "checkpoints") for path in root.glob("step_*") if path.is_dir()]
    found = {int(match[1]): path for path in folders if (match := re.fullmatch(r"step_(\d+)", path.name))}
    if not found:
        what = f"{run} has no checkpoints (step_000100 …) in it" if run.is_dir() else f"There is no folder {run}"
        raise ConfigError(f"{what}. --all wants the folder of a run, or its checkpoints folder.")
    return [found[step] for step in sorted(found)]


def planned(args: argparse.Namespace) -> list[Push]:
    """Checks all checkpoints before the first is sent."""
    folders = checkpoints_of(args.checkpoint) if args.all else [args.checkpoint]
    return [
        Push(
            folder=folder,
            files=checkpoint_files(folder),
            revision=folder.name if args.all else args.revision,
            message=args.commit_message or f"Upload {folder.name}",
        )
        for folder in folders
    ]


# --- sending ---


def push(api: HfApi, repo_id: str, item: Push, tokenizer: dict[str, Path]) -> str:
    """Upload as one commit; returns its URL."""
    files = {**tokenizer, **item.files}  # a checkpoint's own tokenizer takes precedence
    if item.revision is not None:
        _make_branch(api, repo_id, item.revision)
    there = api.list_repo_files(repo_id, revision=item.revision)
    stale = [name for name in there if name not in files and _matches(Path(name).name, STALE)]
    operations: list[Any] = [CommitOperationDelete(path_in_repo=name) for name in stale]
    operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in files.items()]
    done = api.create_commit(repo_id, operations, commit_message=item.message, revision=item.revision)
    size = sum(path.stat().st_size for path in files.values())
    removed = f", {len(stale)} stale ones removed" if stale else ""
    print(f"{item.folder} -> {repo_id}@{item.revision or 'main'}: {len(files)} files, {size / 1e6:.1f} MB{removed}")
    return str(done.commit_url)


def _make_branch(api: HfApi, repo_id: str, branch: str) -> None:
    try:
        api.create_branch(repo_id, branch=branch)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        print(f"The branch {branch} is there already; this adds a commit to it.")


def make_repo(api: HfApi, repo_id: str, *, private: bool) -> str:
    """Create the repository if needed; returns its full name."""
    full_name: str = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(full_name).private:
        raise Refused(
            f"--private was asked for, but {full_name} exists and is public. Nothing was sent: make it private on the hub, "
            "leave --private out, or choose another name."
        )
    return full_name


def explained(error: HTTPError | HFValidationError | ConnectionError, args: argparse.Namespace, endpoint: str) -> str:
    """An error for a failed hub call, with what to do."""
    if isinstance(error, HFValidationError):
        return f"{args.repo_id!r} is no repository name: {error} Write it as user/model."
    if not isinstance(error, HfHubHTTPError):
        return (
            f"{endpoint} cannot be reached ({error or type(error).__name__}). Is there a network; is --endpoint right?"
        )
    status, said = error.response.status_code, error.server_message or str(error).strip().splitlines()[0]
    if status == 401:
        return (
            f"{endpoint} does not accept the token (401: {said}). Set HF_TOKEN to one with write access, or run "
            "`hf auth login`."
        )
    if status == 403:
        return f"The token may not write to {args.repo_id} (403: {said}). Use one that may, or another name."
    return f"{endpoint} refused (HTTP {status}): {said}"


# --- the command ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Upload a checkpoint to the Hugging Face Hub, without its optimizer.", allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint folder; with --all, the folder of a run")
    add("repo_id", help="user/model; it is made if it does not exist")
    add("--private", action="store_true", help="make the repository private; an existing public one is refused")
    add("--commit-message", metavar="TEXT", help="(Upload step_…)")
    add("--revision", metavar="BRANCH", help="the branch to commit to, made if it does not exist (main)")
    add("--all", action="store_true", help="every checkpoint of the run, each to the branch step_…")
    add(
        "--base-model", metavar="MODEL", help="a folder or hub id whose tokenizer goes along; the checkpoint's own wins"
    )
    add("--endpoint", metavar="URL", help="of another hub (HF_ENDPOINT, else https://huggingface.co)")
    args = parser.parse_args(arguments)
    if args.all and args.revision:
        parser.error("--all makes a branch for each checkpoint; it does not go with --revision")
    return args


def run(args: argparse.Namespace) -> int:
    pushes = planned(args)
    api = HfApi(endpoint=args.endpoint)
    try:
        with tokenizer_files(args.base_model) as tokenizer:
            repo_id = make_repo(api, args.repo_id, private=args.private)
            for item in pushes:
                print(push(api, repo_id, item, tokenizer), flush=True)
    except (HTTPError, HFValidationError, ConnectionError) as error:
        raise Refused(explained(error, args, api.endpoint)) from error
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """A user error is one line, not a traceback."""
    try:
        return run(parse(arguments))
    except LudicError as error:
        print(f"push_to_hub: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; what was committed stays, the rest was not sent.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
