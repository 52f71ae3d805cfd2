"""Names under which Kubernetes and the local fleet know our resources and probes."""

GROUP = "pagefleet.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

KIND = "InferenceService"
PLURAL = "inferenceservices"
SINGULAR = "inferenceservice"
SHORT_NAME = "pfis"
CATEGORY = "pagefleet"

LIVE_PATH = "/livez"
"""Answers 200 while the process should be kept."""
READY_PATH = "/readyz"
"""Answers 200 while the process should get traffic."""
