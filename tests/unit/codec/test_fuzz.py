"""The C kernel under AddressSanitizer and UndefinedBehaviorSanitizer, on random and hostile input.

`SHARDCAST_FUZZ_ROUNDS=1000000 SHARDCAST_FUZZ_SEED=7` looks further.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNEL = Path(__file__).resolve().parents[3] / "shardcast" / "codec" / "_kernel.c"
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
AGAINST_PYTHON = [
    *("-isystem", sysconfig.get_path("include"), "-DPy_LIMITED_API=0x030b0000", "-fPIC"),
]

AVX2 = {"avx2", "bmi1", "bmi2", "popcnt"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vpopcntdq"}


def paths_of_this_processor() -> int:
    """How many paths the kernel has here, by what Linux says of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return 1 + (set(flags) >= AVX2) + (set(flags) >= AVX2 | AVX512)


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
        _compile(compiler, level, *AGAINST_PYTHON, "-c", str(KERNEL), "-o", out)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "options",
    [
        SANITIZERS,
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
    # Each payload is decoded on every path that there is, and all are there that this machine runs.
    assert int(words[words.index("paths;") - 1]) == paths_of_this_processor()
    assert int(words[words.index("refused,") - 1]) > 1000
    assert int(words[words.index("taken") - 1]) > 100


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    ("fault", "says"),
    [("beyond", "heap-buffer-overflow"), ("shift", "shift exponent")],
)
def test_the_sanitizers_see_what_they_are_there_for(
    compiler: str, fault: str, says: str, tmp_path: Path
) -> None:
    """One byte too far, or a shift too wide, and the fuzzer's build says so."""
    source, program = tmp_path / "fault.c", tmp_path / "fault"
    source.write_text(FAULTS)
    _compile(compiler, *SANITIZERS, "-o", str(program), str(source))
    result = subprocess.run([str(program), fault], check=False, capture_output=True, text=True)
    assert result.returncode != 0
    assert says in result.stderr


FAULTS = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv)
{
    size_t size = 8 * (size_t)argc;
    uint8_t *held = calloc(size, 1);
    size_t at = argc > 1 && strcmp(argv[1], "beyond") == 0 ? size : 0;
    unsigned wide = argc > 1 && strcmp(argv[1], "shift") == 0 ? 40 : 4;
    return (held[at] ^ (1u << wide)) == 77;
}
"""

UNDER_SANITIZERS = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("shardcast.codec._kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
sys.modules[spec.name] = kernel
import shardcast.codec.kernel
import pytest

assert shardcast.codec.kernel.decode_changes is kernel.decode_changes
sys.exit(pytest.main(sys.argv[2:]))
"""


SLOW = ["-k", "not more_tensors and not all_groups"]
"""Left out: slow loops in Python, that take the kernel nowhere else."""


def test_python_s_side_of_the_kernel_leaves_no_buffer_either(tmp_path: Path) -> None:
    """Frames good, damaged and hostile, through a kernel that was built with sanitizers."""
    compiler = "gcc"  # clang's runtime is linked to programs, not to what they load
    assert compiler in COMPILERS
    kernel, program = tmp_path / "_kernel.so", tmp_path / "under.py"
    _compile(compiler, *SANITIZERS, *AGAINST_PYTHON, "-shared", str(KERNEL), "-o", str(kernel))
    program.write_text(UNDER_SANITIZERS)
    found = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves some to the end of the process
        "PYTHONMALLOC": "malloc",  # each buffer by itself, between red zones
    }
    tests = [str(HERE / name) for name in ("test_hostile.py", "test_round_trips.py")]
    result = subprocess.run(
        [sys.executable, str(program), str(kernel), "-q", "-p", "no:cacheprovider", *tests, *SLOW],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
        cwd=HERE.parents[2],
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
