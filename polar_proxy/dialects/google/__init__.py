"""Google GenerateContent."""

from polar_proxy.dialects.google.dialect import (
    GoogleGenerateContent,
    GoogleTokenCount,
    google_model_card,
    google_model_list,
    google_route,
)

__all__ = ["GoogleGenerateContent", "GoogleTokenCount", "google_model_card", "google_model_list", "google_route"]
