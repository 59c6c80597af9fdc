#!/usr/bin/env bash
# On a machine with a CUDA device, from a checkout: the CUDA path against the CPU path (kernels, losses, every gradient,
# bits from run to run), then its speed at the size of Qwen3-235B-A22B's layers. Under eight minutes on an H200.
# `scripts/gpu_check.sh parity` or `... speed` does one of the two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
what=${1:-all}
unset TRITON_INTERPRET
"$python" -m lamella.kernels.build
"$python" -m pytest -q -m gpu tests/probe
"$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0))'
if [[ $what != speed ]]; then
  "$python" -m pytest -q -x -m gpu tests/engine/test_cuda.py
fi
if [[ $what != parity ]]; then
  "$python" -m bench.gpu
fi
