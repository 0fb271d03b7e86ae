"""On the path of a node's workers, this has torch claim to be of another version than it is."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

CLAIMED = "2.9.1+cpu"


class Claim(importlib.abc.MetaPathFinder):
    """Finds torch as ever, and corrects it once it is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002 - the importer calls it with all three
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            module.__version__ = CLAIMED  # type: ignore[attr-defined] # a module is told no names

        spec.loader.exec_module = loaded  # type: ignore[method-assign] # to be there once torch is loaded
        return spec


sys.meta_path.insert(0, Claim())
