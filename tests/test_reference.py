"""Every command, option, setting, route and model has a description, and docs/reference is generated from them."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from polar_proxy.documented import field_descriptions
from tests.cli.process import ROOT


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The program scripts/reference.py as a module."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def test_every_command_and_option_has_a_help_text(reference: ModuleType) -> None:
    commands = list(reference.commands())
    assert len(commands) > 50
    assert [name for name, text, _ in commands if not text.endswith((".", ":"))] == []
    undescribed = [
        f"{name} {one.name}"
        for name, _, parameters in commands
        for one in parameters
        if not one.help.rstrip(")").endswith(".")
    ]
    assert undescribed == []


def test_every_setting_has_a_description(reference: ModuleType) -> None:
    sections = dict(reference.settings_models())
    assert {"", "gateway", "engine", "run", "admission", "sandboxes", "api", "log", "telemetry"} == sections.keys()
    undescribed = [
        f"{name}.{key}"
        for name, model in sections.items()
        for key in model.model_fields.keys() - field_descriptions(model).keys()
    ]
    assert undescribed == []
    assert [name for name, model in sections.items() if not model.__doc__] == []


def test_every_route_and_parameter_has_a_description(reference: ModuleType) -> None:
    operations: dict[str, Any] = {
        f"{method.upper()} {path}": operation
        for path, methods in reference.openapi()["paths"].items()
        for method, operation in methods.items()
    }
    assert len(operations) > 25
    assert [name for name, operation in operations.items() if not operation.get("description")] == []
    undescribed = [
        f"{name} {parameter['name']}"
        for name, operation in operations.items()
        for parameter in operation.get("parameters", ())
        if not parameter.get("description")
    ]
    assert undescribed == []


def test_every_model_and_field_of_the_api_has_a_description(reference: ModuleType) -> None:
    schemas = reference.openapi()["components"]["schemas"]
    own = {name: schema for name, schema in schemas.items() if name not in ("HTTPValidationError", "ValidationError")}
    assert len(own) > 40
    undescribed = [name for name, schema in own.items() if not schema.get("description")]
    undescribed += [
        f"{name}.{key}"
        for name, schema in own.items()
        for key, field in schema.get("properties", {}).items()
        if not field.get("description")
    ]
    assert undescribed == []


def test_pages_are_up_to_date(reference: ModuleType) -> None:
    assert reference.outdated() == [], "run `python scripts/reference.py`"
