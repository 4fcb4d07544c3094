#!/usr/bin/env bash
# Put SGLang 0.5.23 into a virtual environment of its own, on a machine without an accelerator, and what our
# tests of it need (x86-64, Python 3.11, 2 GB).
# usage: tests/engine_sglang/install.sh VENV
#        SHARDCAST_SGLANG_TESTS=1 VENV/bin/python -m pytest --timeout 300 tests/engine_sglang
# SGLang requires torch 2.14 and CUDA packages of many gigabytes, none of which a CPU needs: so its wheel goes
# in alone, with torch for CPUs, and what it imports follows.
set -euo pipefail
[[ $# -eq 1 && -x $1/bin/python ]] || { echo "usage: $0 VENV (a virtual environment)" >&2; exit 2; }
here=$(cd "$(dirname "$0")/../.." && pwd)
python=$1/bin/python
pip=("$python" -m pip --disable-pip-version-check install --quiet)

"${pip[@]}" "torch==2.13.0" "transformers==5.19.0"
"${pip[@]}" --no-deps "sglang==0.5.23" "triton==3.9.0" "torchvision==0.28.0" \
  "compressed-tensors==0.18.0" "xgrammar==0.2.7" "apache-tvm-ffi==0.1.11"
"${pip[@]}" "torch==2.13.0" aiohttp anthropic blobfile dill distro easydict einops fastapi gguf interegular \
  IPython "llguidance>=1.7.6,<2" loguru msgspec ninja numba==0.65.1 nvidia-ml-py "openai==2.8.0" \
  "openai-harmony==0.0.4" orjson outlines==0.1.11 partial_json_parser pillow prometheus-client psutil pybase64 \
  pydantic "python-dateutil<3" python-multipart pyzmq regex requests safetensors scipy sentencepiece \
  setproctitle soundfile tiktoken tqdm "uvicorn>=0.51" uvloop watchfiles xxhash zstandard
"${pip[@]}" --editable "$here[dev]"
"$python" -c 'import importlib.metadata; print("sglang", importlib.metadata.version("sglang"))'
