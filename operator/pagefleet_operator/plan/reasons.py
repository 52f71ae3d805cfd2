"""The reasons that conditions give: one word each. `docs/troubleshooting.md` has a chapter on every one."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a condition is as it is."""

    # What is good, or on its way.
    SERVING = "Serving"
    ALL_READY = "AllReady"
    CACHED = "Cached"
    NOT_NEEDED = "NotNeeded"
    SETTLED = "Settled"
    AS_WANTED = "AsWanted"
    STARTING = "Starting"
    LOADING_MODEL = "LoadingModel"
    INSPECTING = "Inspecting"
    DOWNLOADING = "Downloading"
    WAITING_FOR_MODEL = "WaitingForModel"
    ROLLING_OUT = "RollingOut"
    CANARY = "Canary"
    SCALING = "Scaling"
    WAITING = "Waiting"
    # The autoscaler.
    SCALED_BY_DEMAND = "ScaledByDemand"
    IDLE = "Idle"
    WAKING = "Waking"
    AT_MAXIMUM = "AtMaximum"
    AT_QUOTA = "AtQuota"
    ADVISED = "Advised"
    SCALED_OUTSIDE = "ScaledOutside"
    SIGNALS_MISSING = "SignalsMissing"
    # What somebody asked for.
    SCALED_TO_ZERO = "ScaledToZero"
    PAUSED = "Paused"
    # The model's files.
    MODEL_NOT_FOUND = "ModelNotFound"
    ACCESS_DENIED = "AccessDenied"
    STORE_UNREACHABLE = "StoreUnreachable"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    DISK_FULL = "DiskFull"
    BAD_MODEL = "BadModel"
    CLAIM_MISSING = "ClaimMissing"
    CLAIM_PENDING = "ClaimPending"
    JOB_FAILED = "JobFailed"
    # Prefill and decode engines.
    KV_LINKED = "KVLinked"
    KV_INCOMPATIBLE = "KVIncompatible"
    KV_LINK_DOWN = "KVLinkDown"
    # Pods.
    NOT_READY = "NotReady"
    INSUFFICIENT_GPU = "InsufficientGPU"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOP = "CrashLoop"
    OUT_OF_MEMORY = "OutOfMemory"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    SETTINGS_REFUSED = "SettingsRefused"
    SECRET_MISSING = "SecretMissing"  # noqa: S105 a condition's reason, no secret
    VOLUME_FAILED = "VolumeFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_FORBIDDEN = "PodForbidden"
    NODE_LOST = "NodeLost"
    GPU_FAILED = "GpuFailed"
    # The InferenceService, and what the operator made of it.
    PARTLY_READY = "PartlyReady"
    ROLLOUT_STOPPED = "RolloutStopped"
    CANARY_FAILED = "CanaryFailed"
    INVALID_SPEC = "InvalidSpec"
    PROFILE_NOT_FOUND = "ProfileNotFound"
    PROFILE_INVALID = "ProfileInvalid"
    NAME_TAKEN = "NameTaken"
    NOT_ALLOWED = "NotAllowed"
    KIND_MISSING = "KindMissing"
    APPLY_REFUSED = "ApplyRefused"
    DOES_NOT_FIT = "DoesNotFit"


NORMAL = frozenset(
    {
        Reason.SERVING,
        Reason.ALL_READY,
        Reason.CACHED,
        Reason.NOT_NEEDED,
        Reason.SETTLED,
        Reason.AS_WANTED,
        Reason.STARTING,
        Reason.LOADING_MODEL,
        Reason.INSPECTING,
        Reason.DOWNLOADING,
        Reason.WAITING_FOR_MODEL,
        Reason.ROLLING_OUT,
        Reason.CANARY,
        Reason.SCALING,
        Reason.WAITING,
        Reason.SCALED_BY_DEMAND,
        Reason.IDLE,
        Reason.WAKING,
        Reason.AT_MAXIMUM,
        Reason.ADVISED,
        Reason.SCALED_OUTSIDE,
        Reason.KV_LINKED,
        Reason.SCALED_TO_ZERO,
        Reason.PAUSED,
    }
)
"""Reasons that ask nobody to do anything; all others are worth a warning."""
