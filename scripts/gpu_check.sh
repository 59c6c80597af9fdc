#!/usr/bin/env bash
# On a machine with a CUDA device, from a checkout: the CUDA path against the CPU path (loss and every gradient).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -m lamella.kernels.build
"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(0))'
"$python" -m pytest -q -m gpu tests/engine/test_cuda.py
