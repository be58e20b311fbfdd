"""Import archives, and check the tasks and certificates in them.

The package `store` cannot check these, because their pydantic models are in packages that it must not import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polar_proxy.errors import BadTaskError, first_problem
from polar_proxy.store import Store
from polar_proxy.store.maintenance.archive_import import MAX_BYTES, ArchiveCounts
from polar_proxy.store.maintenance.verify import ProgressCallback, no_progress
from polar_proxy.tasks import task_from_json
from polar_proxy.traces.certificate import CERTIFICATE_SCHEMA, StoredCertificate


async def import_archive(
    store: Store, file: Path, *, max_bytes: int = MAX_BYTES, progress: ProgressCallback = no_progress
) -> ArchiveCounts:
    """Import a whole archive in one transaction. If the archive is bad, import nothing and raise StoreError."""
    models = {("tasks", "spec"): _check_task, ("traces", "certificate"): _check_certificate}
    return await store.archive.import_archive(file, max_bytes=max_bytes, progress=progress, models=models)


def _check_task(spec: Any) -> None:
    try:
        task_from_json(spec)
    except BadTaskError as error:
        raise ValueError(f"is not a task: {error}") from None


def _check_certificate(certificate: Any) -> None:
    """Raise ValueError if this is not a certificate.

    Certificates of earlier versions are not checked, because Polar keeps them but never uses them (see
    `certificate.restore`).
    """
    if certificate.get("schema") in range(1, CERTIFICATE_SCHEMA):
        return
    try:
        StoredCertificate.model_validate(certificate)
    except ValidationError as error:
        raise ValueError(f"is not a certificate: {first_problem(error)}") from None
