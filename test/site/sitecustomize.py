"""Changes torch in the processes of Python tests. Python imports this before anything else, where PYTHONPATH has it.

FARANDOLE_TEST_OLDER_TORCH hides DLPack's C functions, as torch before 2.10 has none. FARANDOLE_TEST_QUICK_TORCH, which
test/python/conftest.py sets for processes that tests start, saves two thirds of the processor time that one needs for
torch and an optimizer: no garbage is collected in an import, and neither an optimizer nor a choice of deterministic
kernels imports torch's compiler.
"""

import functools
import gc
import importlib.util
import os
import sys


def _hide_dlpack(torch):
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        del torch.Tensor.__dlpack_c_exchange_api__


def _keep_what_is_imported(torch):
    gc.freeze()
    gc.enable()


def _choose_kernels_alone(torch):
    """torch's function sets an option of the compiler as well."""
    original = torch.use_deterministic_algorithms

    @functools.wraps(original)
    def call(mode, *, warn_only=False):
        if "torch._inductor" in sys.modules:
            original(mode, warn_only=warn_only)
        else:
            torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)

    torch.use_deterministic_algorithms = call


def _without_compiler(decorate, plain=lambda function: function):
    """A decorator of torch that imports torch's compiler, changed to do so only where another has imported it."""

    def decorator(function=None, *arguments, **options):
        if function is None:
            return functools.partial(decorator, *arguments, **options)
        undecorated = plain(function)
        decorated = functools.cache(lambda: decorate(function, *arguments, **options))

        @functools.wraps(function)
        def call(*arguments, **options):
            return (decorated() if "torch._dynamo" in sys.modules else undecorated)(*arguments, **options)

        return call

    return decorator


def _with_gradients_if_differentiable(function):
    @functools.wraps(function)
    def call(self, *arguments, **options):
        import torch

        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return function(self, *arguments, **options)

    return call


def _postpone_disabling(module):
    module._disable_dynamo = _without_compiler(module._disable_dynamo)


def _postpone_disabling_by_users(module):
    module.disable = _without_compiler(module.disable)


def _postpone_graph_breaks(module):
    original = module._use_grad_for_differentiable
    module._use_grad_for_differentiable = _without_compiler(original, _with_gradients_if_differentiable)


class _Finder:
    """Finds a module once, as the other finders do, and changes it when it has been imported."""

    def __init__(self, changes):
        self.changes = changes

    def find_spec(self, name, path=None, target=None):
        if name not in self.changes:
            return None
        changes = self.changes.pop(name)
        if name == "torch" and _keep_what_is_imported in changes:
            gc.disable()
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module):
                execute(module)
                for change in changes:
                    change(module)

            spec.loader.exec_module = execute_and_change
        return spec


_changes = {}
if "FARANDOLE_TEST_OLDER_TORCH" in os.environ:
    _changes["torch"] = [_hide_dlpack]
if "FARANDOLE_TEST_QUICK_TORCH" in os.environ:
    _changes.setdefault("torch", []).extend([_keep_what_is_imported, _choose_kernels_alone])
    _changes["torch._compile"] = [_postpone_disabling]
    _changes["torch.compiler"] = [_postpone_disabling_by_users]
    _changes["torch.optim.optimizer"] = [_postpone_graph_breaks]
sys.meta_path.insert(0, _Finder(_changes))
