"""Request and response bodies of the HTTP API, shared by the server (`api`) and the client (`client`).

Times are seconds since the epoch, durations are seconds. The docstrings of classes and fields are the descriptions in
the OpenAPI document.
"""

from polar_proxy.api_models.activity import *  # noqa: F403
from polar_proxy.api_models.feedback import *  # noqa: F403
from polar_proxy.api_models.records import *  # noqa: F403
from polar_proxy.api_models.requests import *  # noqa: F403
from polar_proxy.api_models.responses import *  # noqa: F403

API_PREFIX = "/api/v1"
NDJSON = "application/x-ndjson"
EXPORT_REPORT = "export_report"
"""Name of the only field in the last line of an export. The value of the field is an ExportSummary."""
