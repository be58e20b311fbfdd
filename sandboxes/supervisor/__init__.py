"""The process that stands between the owner and the programs of one `process` or `bubblewrap` sandbox.

Run by the owner's Python as a program of its own (`-I -S`, standard library only, single-threaded). It starts bwrap,
then enters its namespaces and gives up every privilege, so nothing has to be installed inside. It stays outside the
process namespace, where a program inside can neither see nor signal it.

* The control socket is the lifeline: when it closes (the owner closed it, or died, even by `kill -9`), all ends.
* Each command runs below a *shim*: a fork of this process that is the subreaper of the command's whole tree. Whatever
  the command detaches (double fork, setsid, cleaned environment) is still the shim's, so that a kill finds it.

Messages are JSON after an 8-byte header (length, number of file descriptors), descriptors travel with the header.
"""

from .wire import Channel, frame

__all__ = ["Channel", "frame"]
