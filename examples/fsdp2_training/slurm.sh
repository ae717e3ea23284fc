#!/bin/bash
# One machine with four GPUs: the first generates with vLLM, the other three train with FSDP2.
#
#   sbatch examples/fsdp2_training/slurm.sh --data math_train.jsonl --eval-data math500.jsonl
#
# Flags are handed on to train_math_fsdp2.py. Before the time is up Slurm sends a signal; the run saves a checkpoint and is queued
# again, where it goes on. Not tried on a cluster: tests run it with stand-ins for vLLM and torchrun.

#SBATCH --job-name=math-fsdp2
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=256G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@180
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append

set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
OUT=${OUT:-runs/math_fsdp2}
PORT=${PORT:-8000}
MAX_SEQ_LEN=${MAX_SEQ_LEN:-4096}
NUM_TRAINERS=${NUM_TRAINERS:-3}
START_S=${START_S:-900}   # how long the server may take to load the model

SERVER="http://127.0.0.1:$PORT"
TOKEN="$OUT/vllm"         # the server writes its control token there
mkdir -p "$OUT"

CUDA_VISIBLE_DEVICES=0 ludic serve --engine vllm --model "$MODEL" --port "$PORT" --max-model-len "$MAX_SEQ_LEN" \
    -- --run-folder "$TOKEN" > "$OUT/vllm.log" 2>&1 &
SERVER_PID=$!
trap 'kill "$SERVER_PID" 2> /dev/null || true; wait "$SERVER_PID" 2> /dev/null || true' EXIT

until curl --silent --fail --output /dev/null "$SERVER/health"; do
    if ! kill -0 "$SERVER_PID" 2> /dev/null; then
        echo "vLLM did not start; the end of $OUT/vllm.log:" >&2
        tail -n 20 "$OUT/vllm.log" >&2
        exit 1
    fi
    if (( SECONDS > START_S )); then
        echo "vLLM was not ready after $START_S s; see $OUT/vllm.log, or raise START_S." >&2
        exit 1
    fi
    sleep 2
done

# A rank that dies ends the others; torchrun then starts all of them again from the last checkpoint, twice at most.
GPUS=$(seq -s, 1 "$NUM_TRAINERS")
CUDA_VISIBLE_DEVICES=$GPUS torchrun --standalone --nproc-per-node "$NUM_TRAINERS" --max-restarts 2 \
    examples/fsdp2_training/train_math_fsdp2.py --model "$MODEL" --runs "$(dirname "$OUT")" --name "$(basename "$OUT")" \
    --max-seq-len "$MAX_SEQ_LEN" \
    --server "$SERVER" --control-token "$TOKEN" --resume "$@" &
TRAINER_PID=$!

# The shell only hears of a signal when nothing runs in its foreground.
TIME_IS_UP=0
trap 'TIME_IS_UP=1; kill -TERM "$TRAINER_PID" 2> /dev/null || true' TERM
CODE=0
wait "$TRAINER_PID" || CODE=$?
if (( TIME_IS_UP )); then
    wait "$TRAINER_PID" 2> /dev/null || true   # the first wait ended with the signal, not with the run
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$CODE"
