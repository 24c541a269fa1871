"""Builds the engine library as a part of building the package.

A wheel carries the library in ``shim/_lib`` and is tagged for the platform, not for a Python version: the library is
opened with dlopen. An editable install leaves it in the user cache, where ``shim.build.library_path`` finds it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shim.build import LIBRARY, build
from shim.errors import BuildError


class BuildWithLibrary(build_py):
    """Builds the library, or finds it in the cache, and puts it beside the Python files unless they are editable."""

    def run(self) -> None:
        super().run()
        try:
            library = build()
        except BuildError as error:
            raise ExecError(str(error)) from None
        if not self.editable_mode:
            target = Path(self.build_lib, "shim", "_lib", LIBRARY)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)


class PlatformWheel(bdist_wheel):
    """Any Python 3, this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """Carries a binary although it has no extension modules."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
)
