"""Packages of which there is a name and nothing else: what is imported from them raises when it is called."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Absent(ModuleType):
    """A module, class or function that is not there; it has any attribute, of the same kind."""

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{self.__name__} has no stand-in")


class Submodules(MetaPathFinder, Loader):
    """Finds any module below a package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def make_absent(package: ModuleType) -> None:
    """Let anything be imported from `package` that it does not define itself."""
    package.__class__ = Absent
    package.__path__ = []
    sys.meta_path.append(Submodules(package.__name__))
