"""Tests by value: the judge runs the tests. The worker runs the agent's code and never sees the tests."""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import os
import sys
import unittest
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .links import Link, LinkClosedError
from .verdicts import TextFinder, VerdictRecorder

# ---------------------------------------------------------------- the judge's side


def run_tests_by_value(job: dict[str, Any], link: Link) -> dict[str, Any]:
    """Run the hidden tests in this process, the judge.

    If this Python cannot find a module, the worker imports the module and runs the calls of its functions.
    """
    sys.meta_path.insert(0, TextFinder(job["hidden_files"]))
    sys.meta_path.append(RemoteFinder(link))
    verdicts: dict[str, str] = {}
    tests = [test for group in job["groups"] for test in group]
    unittest.defaultTestLoader.loadTestsFromNames(tests).run(VerdictRecorder(verdicts.__setitem__))
    return {"verdicts": verdicts, "signs": []}


class RemoteFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook of the judge: lets the worker import the module, and returns a `RemoteModule` for it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec:
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        ask(self._link, "import", spec.name)
        return RemoteModule(spec.name, self._link)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the worker executed the module when `create_module` asked for it."""


class RemoteModule(ModuleType):
    """A module of the worker: its functions are called there, its plain values are copied."""

    def __init__(self, name: str, link: Link) -> None:
        super().__init__(name)
        self._link = link

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind, value = ask(self._link, "get", self.__name__, name)
        if kind != "callable":
            return decode(value)

        def call(*args: Any, **kwargs: Any) -> Any:
            return decode(ask(self._link, "call", self.__name__, name, encode(list(args)), encode(kwargs)))

        return call


def ask(link: Link, *request: Any) -> Any:
    """Return the worker's answer. If the agent's code raised an exception, raise the nearest built-in exception
    here."""
    link.send(request)
    reply = link.receive()
    if not (isinstance(reply, list) and len(reply) == 2):
        raise LinkClosedError(f"the worker sent a malformed reply: {reply!r}")
    if reply[0] == "answer":
        return reply[1]
    name, text = reply[1]
    kind = getattr(builtins, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    try:
        raised: Exception = kind(str(text))
    except TypeError:  # UnicodeDecodeError and the like take other arguments
        raised = RuntimeError(str(text))
    raise raised


# ---------------------------------------------------------------- the worker's side


def serve_calls(link: Link) -> None:
    """Answer the judge's requests until the judge ends."""
    sys.path.insert(0, os.getcwd())
    while True:
        try:
            operation, *arguments = link.receive()
        except LinkClosedError:
            return
        try:
            link.send(("answer", _OPERATIONS[operation](*arguments)))
        except BaseException as error:  # noqa: BLE001 (the agent's code may raise anything; the judge raises it again)
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            link.send(("raised", (names[0], str(error)[:10_000])))


def _import(module: str) -> None:
    importlib.import_module(module)


def _get(module: str, name: str) -> Any:
    value = getattr(sys.modules[module], name)
    return ("callable", None) if callable(value) else ("value", encode(value))


def _call(module: str, name: str, args: Any, kwargs: Any) -> Any:
    return encode(getattr(sys.modules[module], name)(*decode(args), **decode(kwargs)))


_OPERATIONS: dict[str, Callable[..., Any]] = {"import": _import, "get": _get, "call": _call}


# ---------------------------------------------------------------- plain values


def encode(value: Any) -> Any:
    """Return a plain value as JSON that keeps its type. Raises TypeError for any other object."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    raise TypeError(f"these tests can only compare plain values, not objects of the type {kind.__name__}")


def decode(value: Any) -> Any:
    """Undo `encode`: return an object of a built-in type. Raises TypeError, ValueError or KeyError for a malformed
    value."""
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise TypeError("not a plain value")
    ((kind, items),) = value.items()
    return _DECODERS[kind](items)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda items: [decode(item) for item in items],
    "tuple": lambda items: tuple(decode(item) for item in items),
    "set": lambda items: {decode(item) for item in items},
    "frozenset": lambda items: frozenset(decode(item) for item in items),
    "dict": lambda items: {decode(key): decode(item) for key, item in items},
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
}
