"""What Farandole uses of JAX that is not public, or has moved from one version to another."""

import jax

__all__ = [
    "current_trace",
    "ir",
    "jax_mlir",
    "lower_jaxpr_to_module",
    "sdy",
    "source_info_util",
    "stablehlo",
    "traceback_util",
]

try:
    import jax._src.interpreters.mlir as jax_mlir
    from jax._src import source_info_util, traceback_util
    from jax._src.lib.mlir.dialects import sdy
    from jax.extend import core as _core
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    lower_jaxpr_to_module = jax_mlir.lower_jaxpr_to_module
    #: Equal within one trace; which moved after jax 0.6.
    current_trace = getattr(_core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"farandole.jax does not know jax {jax.__version__}; use one from 0.6 to 0.12: {error}"
    ) from error
