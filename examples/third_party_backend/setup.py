"""Builds the shared library with the machine's own C++ compiler; everything else is in pyproject.toml."""

import os
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """A plain shared library, loaded with ctypes: no Python or torch header is involved, so one build serves every Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


FLAGS = [
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a row's bits must not depend on what the compiler fuses where; fma() says where
    "-Wall",
    "-Wno-psabi",
    # The machine that builds is the machine that runs. For wheels that travel: SIMD_MARCH=x86-64-v3.
    f"-march={os.environ.get('SIMD_MARCH', 'native')}",
]

setup(
    ext_modules=[
        Extension(
            "deepinfer_simd._simd",
            sources=sorted(glob("src/*.cpp")),
            depends=sorted(glob("src/*.hpp")),
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
)
