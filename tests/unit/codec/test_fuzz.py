"""The C kernel under AddressSanitizer and UndefinedBehaviorSanitizer, on random and hostile input.

`SHARDCAST_FUZZ_ROUNDS=1000000 SHARDCAST_FUZZ_SEED=7` looks further.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNEL = Path(__file__).resolve().parents[3] / "shardcast" / "codec" / "_kernel.c"
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Werror"]


def _compile(compiler: str, *options: str) -> None:
    result = subprocess.run(
        [compiler, *WARNINGS, *options], check=False, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr


def test_there_is_a_compiler_as_there_must_be_to_install() -> None:
    assert COMPILERS


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_kernel_compiles_without_a_warning(compiler: str, tmp_path: Path) -> None:
    out = str(tmp_path / "kernel.o")
    for level in ("-O0", "-O3"):
        headers = ["-isystem", sysconfig.get_path("include"), "-DPy_LIMITED_API=0x030b0000"]
        _compile(compiler, level, *headers, "-fPIC", "-c", str(KERNEL), "-o", out)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "options",
    [
        ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        ["-O3"],  # as it is shipped: what a compiler does to it must be right, too
    ],
    ids=["sanitized", "shipped"],
)
def test_no_input_makes_the_kernel_leave_its_buffers(
    compiler: str, options: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "fuzz"
    driver = str(HERE / "fuzz_kernel.c")
    _compile(compiler, *options, "-Wno-unused-function", "-o", str(program), driver)
    seed = os.environ.get("SHARDCAST_FUZZ_SEED", "1")
    rounds = os.environ.get("SHARDCAST_FUZZ_ROUNDS", "12000")
    result = subprocess.run(
        [str(program), seed, rounds],
        check=False,
        capture_output=True,
        text=True,
        timeout=100 if rounds == "12000" else None,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    # Damage reaches the decoder's depth: some of it decodes (to other bytes), most is refused.
    words = result.stdout.split()
    assert int(words[words.index("refused,") - 1]) > 1000
    assert int(words[words.index("taken") - 1]) > 100
