"""Compiles the CPU kernels at install, also for `pip install -e .`; everything else is in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

KERNELS = Path(__file__).parent / "lamella" / "kernels"


def load_builder():
    """lamella/kernels/build.py by its path: importing the package needs torch, absent in the build environment."""
    spec = importlib.util.spec_from_file_location("lamella_kernels_build", KERNELS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        builder = load_builder()
        folder = KERNELS / "cpu" if self.editable_mode else Path(self.build_lib) / "lamella" / "kernels" / "cpu"
        try:
            made = builder.build(folder)
        except builder.CompileError as error:
            print(f"lamella: CPU kernels not built, plain torch will be used (slower): {error}", file=sys.stderr)
        else:
            print(f"lamella: built {made}", file=sys.stderr)


class PlatformDistribution(Distribution):
    def has_ext_modules(self):  # the wheel holds a compiled library
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=PlatformDistribution)
