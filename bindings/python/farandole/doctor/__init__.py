"""``farandole doctor``: what is here, from where, whether two ranks work, and what would help.

``find.py`` and ``gpu.py`` look, ``two_ranks.py`` runs a job (``measure.py`` is what its ranks do), ``report.py`` tells.
Nothing here imports torch, MPI or CUDA: foreign libraries are loaded in child processes.
"""

from farandole.doctor.report import main

__all__ = ["main"]
