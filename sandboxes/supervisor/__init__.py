"""The supervisor: the process between the owner and the programs of one `process` or `bubblewrap` sandbox.

The owner's Python runs it as a separate program (`-I -S`, standard library only, single-threaded). It starts bwrap,
enters its namespaces and drops all privileges, so nothing has to be installed inside. It stays outside of the process
namespace, where programs inside can neither see nor signal it.

* When the control socket closes (the owner closed it, or died, even by `kill -9`), everything ends.
* Each command runs below a *shim*: a fork of the supervisor that is the subreaper of the command's process tree.
  Processes that the command detaches (double fork, setsid, cleaned environment) remain descendants of the shim, so that
  a kill finds them.

Messages are JSON after an 8-byte header (length, number of file descriptors); the descriptors are sent with the header.
"""

from .protocol import Channel, frame

__all__ = ["Channel", "frame"]
