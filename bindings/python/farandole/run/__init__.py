"""Launching: ``farandolerun -np N PROGRAM ...``. See docs/launching.md.

===================  =============================================================
``main.py``          the program: one path from the command line to the exit code
``arguments.py``     flags, their checks, and the flags of horovodrun that are refused
``hosts.py``         where ranks go
``mpi.py``           which mpirun, and which libmpi belongs to it
``command_line.py``  mpirun's command line and environment
``job.py``           runs it: events, signals, the end
``peers.py``         the connections to the ranks, the launcher's end
``supervise.py``     the same, the rank's end: runs the program; imports nothing of ours
``lines.py``         lines with their rank, on the screen and in files
``verdict.py``       which rank failed first, and in which order that is told
===================  =============================================================

Nothing here imports torch or starts MPI.
"""
