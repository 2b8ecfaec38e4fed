"""Hides DLPack's C functions from whatever imports torch, as torch before 2.10 has none.

For every process of a test, ranks too, by PYTHONPATH: Python imports this before anything else.
"""

import importlib.util
import sys


class _Finder:
    """Finds torch once, as the other finders do, and changes it when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_hide(module):
                execute(module)
                if hasattr(module.Tensor, "__dlpack_c_exchange_api__"):
                    del module.Tensor.__dlpack_c_exchange_api__

            spec.loader.exec_module = execute_and_hide
        return spec


sys.meta_path.insert(0, _Finder())
