"""The metadata that all tables belong to, and the column types that they share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Integer, LargeBinary, MetaData, TypeDecorator
from sqlalchemy.engine import Dialect

from polar_proxy.store import json_codec
from polar_proxy.store.encoding.packed_json import pack_small_json, unpack_small_json

VERSION_TABLE = "polar_schema"
"""The table with the schema revision. A database without it is not a Polar database."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

serial = BigInteger().with_variant(Integer, "sqlite")


class PackedJson(TypeDecorator[Any]):
    """JSON that only Polar reads, packed to about a third of the size of its text."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else pack_small_json(json_codec.dumps(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json_codec.loads(unpack_small_json(value))


def json_column(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, JSON(none_as_null=True), nullable=nullable)


def counter_column(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default="0")
