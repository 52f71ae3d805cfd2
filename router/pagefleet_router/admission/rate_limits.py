"""Requests and tokens per minute of each tenant."""

from __future__ import annotations

import math

from pagefleet_protocol.tenants import Tenant

from pagefleet_router.admission.refusals import rate_limited

FORGET_EVERY_S = 60.0


class RateLimits:
    """The buckets of the tenants that have limits.

    Args:
        share: of each limit that this process may give out.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}
        self._forgot_at = 0.0

    def take(self, tenant: Tenant, num_tokens: int, now: float) -> None:
        """Count a request with the tokens of its prompt.

        Raises:
            Refusal: it does not fit; it says when it will.
        """
        requests = self._bucket(self._requests, tenant.name, tenant.rpm, now)
        tokens = self._bucket(self._tokens, tenant.name, tenant.tpm, now)
        wait = requests.wait(1.0, now) if requests else 0.0
        if tokens:
            wait = max(wait, tokens.wait(num_tokens, now))
        if wait > 0.0:
            remaining = {
                kind: math.floor(bucket.remaining(now))
                for kind, bucket in (("requests", requests), ("tokens", tokens))
                if bucket is not None
            }
            limits = {kind: limit for kind, limit in (("requests", tenant.rpm), ("tokens", tenant.tpm)) if limit}
            raise rate_limited(wait, limits, remaining)
        if requests:
            requests.spend(1.0, now)
        if tokens:
            tokens.spend(num_tokens, now)

    def correct(self, tenant: str, num_tokens: int, now: float) -> None:
        """Take the tokens that a request took beyond its estimate; below zero: give back."""
        bucket = self._tokens.get(tenant)
        if bucket is not None:
            bucket.spend(num_tokens, now)

    def give_back(self, tenant: str, num_tokens: int, now: float) -> None:
        """Undo `take` for a request that was not let in."""
        self.correct(tenant, -num_tokens, now)
        bucket = self._requests.get(tenant)
        if bucket is not None:
            bucket.spend(-1.0, now)

    def forget_idle(self, now: float) -> None:
        """Drop full buckets from time to time: tenants come and go."""
        if now - self._forgot_at < FORGET_EVERY_S:
            return
        self._forgot_at = now
        for buckets in (self._requests, self._tokens):
            for name in [name for name, bucket in buckets.items() if bucket.is_full(now)]:
                del buckets[name]

    def _bucket(
        self, buckets: dict[str, TokenBucket], name: str, limit: int | None, now: float
    ) -> TokenBucket | None:  # fmt: skip
        if limit is None:
            buckets.pop(name, None)
            return None
        per_minute = max(1.0, limit * self._share)
        bucket = buckets.get(name)
        if bucket is None:
            bucket = buckets[name] = TokenBucket(per_minute, now)
        elif bucket.per_minute != per_minute:
            bucket.resize(per_minute, now)
        return bucket


class TokenBucket:
    """May run into debt, by `spend`; then nothing fits until that is paid.

    Args:
        per_minute: what flows in, and what the bucket holds.
        now: monotonic seconds; the bucket is full.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def resize(self, per_minute: float, now: float) -> None:
        """Take another limit; what was spent stays spent."""
        self._settle(now)
        self._level += per_minute - self.per_minute
        self.per_minute = per_minute

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until an amount fits, 0 if now. What is larger than the bucket fits a full one."""
        self._settle(now)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * 60.0 / self.per_minute)

    def spend(self, amount: float, now: float) -> None:
        """Take out, or below zero put back."""
        self._settle(now)
        self._level = min(self.per_minute, self._level - amount)

    def remaining(self, now: float) -> float:
        """Return what is there, at least 0."""
        self._settle(now)
        return max(0.0, self._level)

    def is_full(self, now: float) -> bool:
        """Whether nothing would be lost by forgetting it."""
        self._settle(now)
        return self._level >= self.per_minute

    def _settle(self, now: float) -> None:
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now
