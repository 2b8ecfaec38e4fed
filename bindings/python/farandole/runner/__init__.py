"""Launching: ``farandolerun -np N PROGRAM ...``, and :func:`run` for a function. See docs/launching.md.

=================  ===========================================================================
``cli.py``         flags, configuration file, hosts; starts a job
``api.py``         ``run(function, np=N)``
``mpirun.py``      which mpirun, which libmpi belongs to it, its command line
``hosts.py``       a job without mpirun: how supervisors come to its hosts
``elastic.py``     one whose ranks come and go
``job.py``         one job: the ranks' messages, input, signals, the end
``acceptor.py``    its port for supervisors of other hosts and of mpirun's
``supervisor.py``  the rank's end of a connection: runs the program; imports nothing of ours
``output.py``      lines with their rank, and which rank failed first
=================  ===========================================================================

Nothing here imports torch or starts MPI.
"""

from farandole.runner.api import run

__all__ = ["run"]
