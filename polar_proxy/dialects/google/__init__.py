"""Google GenerateContent."""

from polar_proxy.dialects.google.dialect import (
    GoogleGenerateContent,
    google_model_card,
    google_route,
)

__all__ = ["GoogleGenerateContent", "google_model_card", "google_route"]
