"""The part of the build that needs a program: one C file. Everything else is in pyproject.toml."""

import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

# One wheel for every CPython from 3.11 on; builds without the GIL know no limited API (PEP 703).
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")

KERNEL = Extension(
    "shardcast.codec._kernel",
    ["shardcast/codec/_kernel.c"],
    define_macros=[("Py_LIMITED_API", "0x030b0000")] if LIMITED else [],
    extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra"],
    py_limited_api=LIMITED,
)


class BuildKernel(build_ext):
    """Says what to install where the C file does not compile."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CompileError, LinkError, OSError) as error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            message = (
                f"{ext.sources[0]} was not compiled: {error}\n\n"
                "    Shardcast has one small C file and needs a C compiler and Python's headers once, "
                "to install it.\n"
                f"    Debian, Ubuntu:  apt-get install gcc libc6-dev python{version}-dev\n"
                f"    Fedora, RHEL:    dnf install gcc python{version}-devel\n"
                "    Then run the same pip command again. (A compiler of another name: CC=clang pip ...)\n"
            )
            raise CompileError(message) from error


setup(
    ext_modules=[KERNEL],
    cmdclass={"build_ext": BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
