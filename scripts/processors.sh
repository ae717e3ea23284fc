#!/usr/bin/env bash
# Runs a command as on each kind of x86_64 processor that this machine can stand in for: oneDNN, MKL and PyTorch choose their
# kernels by these variables. It cannot stand in for one with more instructions than its own; on aarch64 the command runs once.
#     scripts/processors.sh .venv/bin/pytest -q tests/unit/models/test_forward.py
# `make test-processors` runs the exactness tests so. The last line says where the command failed.
set -u
failed=""

run_as() {
  local name=$1
  shift
  echo "== $name"
  local settings=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
  while [ "$1" != -- ]; do settings+=("$1"); shift; done
  shift
  env "${settings[@]}" "$@" || failed="$failed $name"
}

run_as native -- "$@"
if [ "$(uname -m)" = x86_64 ]; then
  run_as avx512-without-bf16 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 -- "$@"
  run_as avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 -- "$@"
fi
echo "failed on:${failed:- none}"
[ -z "$failed" ]
